"""Policies written in Python."""

import copy
import pickle

import attrs
import pytest
from hypothesis import given

from coldsnap.errors import PolicyError
from coldsnap.policy import IO, Compatibility, Graphs, NativeWeights, Policy, Process, RecoveryWeights, Weights, leaves
from coldsnap.policy.leaf import flat
from coldsnap.policy.limits import FrozenMap
from strategies import policies

REVISION = "0123456789abcdef0123456789abcdef01234567"


def problems_of(make):
    with pytest.raises(PolicyError) as caught:
        make()
    return dict(caught.value.problems)


def test_the_defaults_are_those_of_the_design():
    expected = {
        "profile": "default",
        "compatibility.kernel": "capability",
        "compatibility.driver": "release",
        "compatibility.enforce_captured_driver_floor": True,
        "weights.mode": "auto",
        "weights.verify": "evidence",
        "weights.native.repository": None,
        "weights.native.revision": None,
        "weights.native.files_by_worker": {},
        "weights.native.materialize": "off",
        "weights.recovery.enabled": True,
        "weights.recovery.loader_backend": "auto",
        "weights.recovery.chunk_bytes": 64 * 2**20,
        "weights.recovery.staging_bytes": 256 * 2**20,
        "weights.recovery.collective_bytes": 64 * 2**20,
        "weights.recovery.queue_depth": 4,
        "weights.recovery.pipeline_depth": 1,
        "weights.recovery.distributed": True,
        "weights.recovery.verify_bytes": 0,
        "weights.recovery.verify_model_bytes": 0,
        "weights.recovery.derived_buffer_max_bytes": 64 * 2**20,
        "process.discard": ("kv_cache",),
        "process.shape_calibration": "auto",
        "process.artifact_scope": "portable",
        "process.cache_seed": True,
        "process.cache_paths": (),
        "process.namespace": "private",
        "process.secrets": "refuse",
        "graphs.policy": "auto",
        "graphs.asynchronous": False,
        "io.hydration_backend": "python",
        "io.capture_backend": "auto",
        "io.hibernate_read_mode": "direct",
        "io.hibernate_write_mode": "direct",
        "io.verify_mode": "inline",
        "io.reuse_blob": True,
        "io.queue_depth": 4,
        "io.chunk_bytes": 64 * 2**20,
        "io.native_library": None,
        "io.native_sha256": None,
        "io.image_compression": "auto",
    }

    assert expected == flat(Policy())
    assert list(expected) == [row.path for row in leaves()]
    assert all(value == row.default for row, value in zip(leaves(), expected.values(), strict=True))


def test_every_default_is_legal_and_every_leaf_is_documented():
    for row in leaves():
        assert row.default is None or row.problem(row.default) is None
        assert row.doc.endswith("."), row.path
        assert row.path.endswith("_bytes") == (row.unit == "bytes"), row.path


def test_a_section_documents_its_leaves():
    assert "queue_depth: Native I/O requests in flight" in IO.__doc__


def test_a_section_names_all_of_its_problems_at_once():
    problems = problems_of(lambda: IO(queue_depth=65, chunk_bytes=5, reuse_blob=1, verify_mode="Inline"))

    assert problems == {
        "$.io.queue_depth": "expected an integer (1 to 64); found integer 65",
        "$.io.chunk_bytes": "expected an integer (multiple of 4096, at least 4096); found integer 5",
        "$.io.reuse_blob": "expected true or false; found integer 1",
        "$.io.verify_mode": ('expected one of inline, preverified; found text "Inline"; did you mean "inline"?'),
    }


def test_a_policy_names_all_broken_rules_at_once():
    problems = problems_of(
        lambda: Policy(
            weights=Weights(
                mode="recovery",
                native=NativeWeights(repository="owner/name"),
                recovery=RecoveryWeights(enabled=False),
            ),
            process=Process(shape_calibration="enabled", cache_seed=False, cache_paths=("~/.cache/vllm",)),
            io=IO(hydration_backend="gds"),
        )
    )

    assert sorted(problems) == [
        "$.io.verify_mode",
        "$.process.cache_paths",
        "$.process.shape_calibration",
        "$.weights.native.revision",
        "$.weights.recovery.enabled",
    ]


@pytest.mark.parametrize("mode", ["auto", "recovery", "cache-only-auto"])
def test_modes_that_may_recover_need_recovery(mode):
    problems = problems_of(lambda: Policy(weights=Weights(mode=mode, recovery=RecoveryWeights(enabled=False))))

    assert list(problems) == ["$.weights.recovery.enabled"]


@pytest.mark.parametrize("mode", ["native", "image"])
def test_modes_that_never_recover_do_without_recovery(mode):
    assert Policy(weights=Weights(mode=mode, recovery=RecoveryWeights(enabled=False))).weights.mode == mode


@pytest.mark.parametrize(
    "native",
    [
        NativeWeights(repository="owner/name"),
        NativeWeights(revision=REVISION),
        NativeWeights(files_by_worker={"worker-0": "a.pack"}),
    ],
)
def test_native_packs_need_repository_and_revision_together(native):
    assert problems_of(lambda: Policy(weights=Weights(native=native)))


def test_enabled_calibration_needs_asynchronous_graphs():
    policy = Policy(process=Process(shape_calibration="enabled"), graphs=Graphs(asynchronous=True))

    assert policy.process.shape_calibration == "enabled"
    assert problems_of(lambda: policy.evolve(**{"graphs.asynchronous": False}))


def test_gds_needs_preverified_files():
    assert Policy(io=IO(hydration_backend="gds", verify_mode="preverified")).io.hydration_backend == "gds"


@pytest.mark.parametrize(
    ("paths", "why"),
    [
        (("relative",), "absolute"),
        (("/etc",), "below one of"),
        (("/var/cache/coldsnap2",), "below one of"),
        (("/var/cache/coldsnap/../coldsnap",), "clean"),
        (("/var/cache/coldsnap/",), "clean"),
        (("//var/cache/coldsnap",), "clean"),
        (("/var/cache/coldsnap\n",), "absolute"),
        (("~/.cache",), "below one of"),
        (("~user/.cache/vllm",), "absolute"),
        (("/home/somebody/.cache/vllm",), "below one of"),
        ((1,), "absolute"),
        (("~/.cache/vllm", "~/.cache/vllm"), "twice"),
        (("~/.cache/vllm/a", "~/.cache/vllm"), "already covers"),
        ("~/.cache/vllm", "expected a list"),
        (None, "expected a list"),
    ],
)
def test_cache_paths_are_clean_below_a_root_and_do_not_overlap(paths, why):
    assert why in problems_of(lambda: Process(cache_paths=paths))["$.process.cache_paths"]


def test_a_sibling_with_the_same_beginning_is_no_overlap():
    assert Process(cache_paths=("~/.cache/torch", "~/.cache/torch_extensions")).seeded_paths == (
        "~/.cache/torch",
        "~/.cache/torch_extensions",
    )


def test_without_cache_paths_the_managed_root_is_seeded_and_without_seeding_nothing():
    assert Process().seeded_paths == ("/var/cache/coldsnap/runtime",)
    assert Process(cache_seed=False).seeded_paths == ()


@pytest.mark.parametrize(
    "files",
    [
        {"worker-0": "/etc/passwd"},
        {"worker-0": "../up"},
        {"worker-0": "a/../../up"},
        {"worker-0": "a//b"},
        {"worker-0": "."},
        {"worker-0": ""},
        {"worker-0": 4},
        {"worker 0": "a"},
        {"": "a"},
        {0: "a"},
        "a",
    ],
)
def test_worker_files_stay_inside_the_repository(files):
    assert problems_of(lambda: NativeWeights(files_by_worker=files))


@pytest.mark.parametrize(
    "settings",
    [
        {"native_library": "relative.so"},
        {"native_library": "/opt/../lib.so"},
        {"native_library": "/opt//lib.so"},
        {"native_library": "/"},
        {"native_library": "/opt/li\nb.so"},
        {"native_sha256": "A" * 64},
        {"native_sha256": "a" * 63},
        {"native_sha256": "sha256:" + "a" * 64},
    ],
)
def test_the_native_library_is_a_clean_path_and_its_digest_64_hex(settings):
    assert problems_of(lambda: IO(**settings))


@pytest.mark.parametrize("revision", ["main", REVISION[:-1], REVISION.upper(), REVISION + "\n"])
def test_a_revision_is_an_immutable_commit(revision):
    assert problems_of(lambda: NativeWeights(revision=revision))


def test_an_unknown_argument_is_the_type_error_of_python():
    with pytest.raises(TypeError, match="queue"):
        IO(queue=4)
    with pytest.raises(TypeError):
        IO(4)


def test_a_section_of_the_wrong_kind_is_named():
    assert problems_of(lambda: Policy(io={"queue_depth": 4}, graphs=Compatibility())) == {
        "$.graphs": "expected Graphs(…); found Compatibility()",
        "$.io": 'expected IO(…); found table {"queue_depth" = 4}',
    }


def test_policies_cannot_be_changed():
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Policy().io.queue_depth = 8


def test_equality_and_hash_look_at_values_alone_and_explicit_tells_apart():
    unset, default = Policy(), Policy(io=IO(queue_depth=4))

    assert unset == default
    assert hash(unset) == hash(default)
    assert (unset.explicit, default.explicit) == (frozenset(), {"io.queue_depth"})
    assert Policy(io=IO(queue_depth=5)) != default


def test_none_is_unset():
    assert NativeWeights(repository=None).explicit == frozenset()


@given(policies())
def test_copies_and_pickles_are_equal_and_remember_what_was_set(policy):
    for other in (copy.deepcopy(policy), copy.copy(policy), pickle.loads(pickle.dumps(policy))):
        assert (other, other.explicit, hash(other)) == (policy, policy.explicit, hash(policy))


@given(policies())
def test_the_repr_shows_what_was_set_and_makes_the_policy_again(policy):
    other = eval(repr(policy))

    assert (other, other.explicit) == (policy, policy.explicit)


def test_the_repr_is_short():
    policy = Policy(weights=Weights(mode="native"), io=IO(queue_depth=8))

    assert repr(policy) == "Policy(weights=Weights(mode='native'), io=IO(queue_depth=8))"
    assert repr(Policy()) == "Policy()"


def test_evolve_takes_dotted_leaves_and_whole_sections():
    policy = Policy(io=IO(queue_depth=8, chunk_bytes=4096))

    changed = policy.evolve(
        io=IO(queue_depth=16), graphs=Graphs(policy="disabled"), **{"weights.native.materialize": "async"}
    )

    assert repr(changed) == (
        "Policy(weights=Weights(native=NativeWeights(materialize='async')), "
        "graphs=Graphs(policy='disabled'), io=IO(queue_depth=16))"
    )
    assert policy.io.queue_depth == 8


def test_evolve_with_none_puts_a_leaf_back():
    policy = Policy(io=IO(queue_depth=8)).evolve(**{"io.queue_depth": None})

    assert (policy, policy.explicit) == (Policy(), frozenset())


def test_evolve_to_the_default_sets_the_leaf():
    assert Policy().evolve(**{"io.queue_depth": 4}).explicit == {"io.queue_depth"}


def test_evolve_names_every_problem_at_once():
    problems = problems_of(
        lambda: Policy().evolve(
            **{"io.queue_dept": 8, "io.chunk_bytes": "4096", "io.hydration_backend": "gds", "weights": 4, "nothing": 1}
        )
    )

    assert problems == {
        "$.io.queue_dept": 'is no leaf of the policy; did you mean "io.queue_depth"?',
        "$.weights": "expected Weights(…); found integer 4",
        "$.nothing": "is no leaf of the policy",
        "$.io.chunk_bytes": 'expected an integer (multiple of 4096, at least 4096); found text "4096"',
        "$.io.verify_mode": (
            'expected "preverified" because io.hydration_backend is "gds"; found "inline"; set it, or take '
            "another backend"
        ),
    }


def test_the_function_of_attrs_evolves_too():
    policy = attrs.evolve(Policy(io=IO(queue_depth=4)), graphs=Graphs(policy="disabled"))

    assert policy.explicit == {"io.queue_depth", "graphs.policy"}
    assert attrs.evolve(policy.io, chunk_bytes=4096).explicit == {"io.queue_depth", "io.chunk_bytes"}
    assert problems_of(lambda: attrs.evolve(policy.io, chunk_bytes=1))


def test_a_map_of_workers_is_frozen():
    files = {"b": "2", "a": "1"}
    native = NativeWeights(files_by_worker=files)
    files["c"] = "3"

    assert native.files_by_worker == {"a": "1", "b": "2"} == dict(native.files_by_worker)
    assert hash(native) == hash(NativeWeights(files_by_worker={"a": "1", "b": "2"}))
    assert pickle.loads(pickle.dumps(native)).files_by_worker == FrozenMap({"a": "1", "b": "2"})
