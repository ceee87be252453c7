"""What the observer sees of real loads: ``load_scenarios``, run once by an interpreter that has torch."""

import pytest

LAYERS = ("layers.0", "layers.1")
DESTINATIONS = sorted(
    ["embed", *(f"{layer}.{name}" for layer in LAYERS for name in ("qkv", "gate_up", "down", "norm", "scale"))]
)


def test_every_destination_of_a_real_load_is_written_exactly(seen):
    whole = seen["a_whole_model"]
    assert whole["written"] == whole["expected"] == DESTINATIONS
    assert whole["copies"] == whole["tensors"] == 17
    assert whole["kept"] == whole["unsupported"] == {}
    assert whole["sources"] == ["model-1.safetensors", "model-2.safetensors"]


def test_what_is_written_holds_the_bytes_of_the_checkpoint(seen):
    assert seen["a_whole_model"]["wrong"] == []
    assert not seen["a_whole_model"]["padding_is_written"]


def test_the_record_replayed_from_the_files_is_every_destination_bit_for_bit(seen):
    assert seen["a_whole_model"]["not_replayed"] == []
    assert ["BF16", "F32"] in seen["a_whole_model"]["converted"]


def test_a_record_survives_json(seen):
    assert seen["a_record_in_json"] == {"same": True}


def test_two_loads_divide_into_the_same_pack(seen):
    shared = seen["two_processes_share_a_pack"]
    assert shared["same"] and shared["extents"] == len(DESTINATIONS)
    assert shared["residual"] == 28 * 32 * 2 + 64 * 4  # padding of the vocabulary, and what no checkpoint has


def test_a_record_follows_its_model_into_a_wrapper_and_into_no_other(seen):
    nested = seen["a_model_in_a_model"]
    assert nested["names"] == [f"language_model.inner.{name}" for name in DESTINATIONS] == nested["copies"]
    assert nested["addresses"]
    assert "is no part of the model" in nested["refused"]


def test_loaders_are_wrapped_for_the_load_and_put_back_whatever_happens(seen):
    loaders = seen["loaders_are_put_back"]
    assert loaders["wrapped"] == ["embed"] + [
        f"{layer}.{name}" for layer in LAYERS for name in ("down", "gate_up", "qkv")
    ]
    assert loaders["restored"] and loaders["name"] == "stacked"
    assert loaders["loads"] == 1.0  # a wrapper that somebody kept is a plain loader after the load


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("mutation", "mutation:aten::add_"),
        ("mutation_after_a_copy", "mutation:aten::add_"),
        ("zeros_after_a_copy", "mutation:aten::zero_"),
        ("out", "mutation:aten::add"),
        ("index_put", "mutation:aten::index_copy_"),
        ("number_out_of_nowhere", "mutation:aten::fill_"),
        ("converted_first", "source-not-aliased"),
        ("source_mutated", "source-mutated"),
        ("beyond_its_tensor", "source-span"),
        ("broadcast", "shape-mismatch"),
        ("empty", "empty-copy"),
        ("staged", "destination-not-aliased"),
        ("complex", "metadata-error"),
        ("other_type_than_the_header", "source-mismatch"),
        ("other_shape_than_the_header", "source-mismatch"),
        ("not_in_the_header", "source-mismatch"),
        ("replaced_in_load", "replaced-in-load"),
        ("replaced_after", "replaced-after-load"),
        ("gone_after", "replaced-after-load"),
        ("changed_after", "changed-after-load"),
        ("stretches", "too-many-stretches"),
    ],
)
def test_what_is_not_seen_exactly_stays_residual_with_its_reason(seen, case, reason):
    found = seen["reasons"][case]
    assert found["unsupported"] == {"p": reason}
    assert found["written"] == []
    assert list(found["kept"]) == [reason] and found["kept"][reason] in (64, 128, 560_000)


WHOLE = [["p", 0, 64]]


@pytest.mark.parametrize(
    ("case", "written", "views"),
    [
        ("zeros_before_a_copy", WHOLE, [[[4, 4], [4, 4]]]),
        ("a_number", [["p", 0, 4]], [[[], [1]]]),
        ("a_number_for_all", [["p", 0, 12]], [[[], [3]]]),
        ("a_number_in_a_tensor", [["p", 4, 4]], [[[], [1]]]),
        ("one_element", [["p", 0, 4]], [[[], []]]),
        ("row_by_row", WHOLE, [[[4], [4]]] * 4),
        ("each", WHOLE, [[[2, 4], [2, 4]]] * 2),
        ("converted", [["p", 0, 32]], [[[4, 4], [4, 4]]]),
        ("as_bytes", WHOLE, [[[4, 16], [4, 16]]]),
        ("a_column", [["p", 4 + 16 * row, 8] for row in range(4)], [[[4, 2], [4, 2]]]),
        ("twice", WHOLE, [[[4, 4], [4, 4]]] * 2),
        ("transposed_afterwards", WHOLE, [[[4, 4], [4, 4]]]),
        ("in_a_thread", WHOLE, [[[4, 4], [4, 4]]]),
        ("without_a_loader", WHOLE, [[[4, 4], [4, 4]]]),
        ("nothing", [], []),
    ],
)
def test_ways_to_copy_that_are_seen_exactly(seen, case, written, views):
    assert seen["exact_loads"][case] == {"unsupported": {}, "kept": {}, "written": written, "views": views}


def test_destinations_that_share_memory_are_told_apart_by_their_bytes(seen):
    shared = seen["destinations_that_share_memory"]
    assert shared["same_bytes_first_name"]["written"] == [["a", 0, 64]]
    assert shared["apart"]["written"] == [["b", 0, 32]]
    assert shared["overlapping"]["written"] == [["a", 0, 40], ["b", 0, 40]]
    assert shared["written_as_one"]["unsupported"] == {"a": "destination-span", "b": "destination-span"}


def test_what_shares_bytes_with_an_unsupported_destination_is_unsupported(seen):
    found = seen["destinations_that_share_memory"]["one_of_them_unsupported"]
    assert found["unsupported"] == {"a": "shares-unsupported", "b": "mutation:aten::add_"}
    assert found["written"] == []


def test_memory_that_is_used_again_is_not_taken_for_a_source(seen):
    again = seen["memory_that_is_used_again_is_not_taken_for_a_source"]
    assert again == {"copies": 0, "reasons": ["source-not-aliased"]}


def test_a_failure_of_the_observer_ends_the_load(seen):
    error = seen["a_damaged_watch_ends_the_load"]["error"]
    assert "the load cannot be observed: aten.copy_.default" in error and "launch with weights.mode" in error
