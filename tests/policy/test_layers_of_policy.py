"""Layers, provenance, explanations and samples."""

import subprocess
import sys

import pytest
from hypothesis import given

from coldsnap.errors import PolicyError
from coldsnap.policy import IO, PROFILES, Policy, Weights, leaves
from coldsnap.policy.leaf import flat
from coldsnap.policy.samples import every_leaf_and_legal_value
from strategies import policies

DRIVER = {"graphs.policy": "recreate-from-plan"}
ENGINE = {"io.hydration_backend": "direct", "io.chunk_bytes": 256 * 2**20}


def test_every_value_remembers_the_layer_that_set_it():
    resolved = Policy(profile="qualification", io=IO(chunk_bytes=4096)).resolved(
        driver_defaults=DRIVER, engine_defaults=ENGINE
    )

    assert {path: layer for path, layer in resolved.provenance.items() if layer != "library"} == {
        "profile": "user",
        "graphs.policy": "driver",
        "io.hydration_backend": "engine",
        "io.chunk_bytes": "user",
        "weights.recovery.verify_bytes": "profile",
        "weights.recovery.verify_model_bytes": "profile",
    }
    assert (resolved["io.chunk_bytes"], resolved["io.hydration_backend"]) == (4096, "direct")
    assert resolved.policy.weights.recovery.verify_model_bytes == 64


def test_a_leaf_set_to_the_library_default_beats_the_layers_below():
    user = Policy(io=IO(hydration_backend="python"))

    assert user == Policy()
    assert user.resolved(engine_defaults=ENGINE)["io.hydration_backend"] == "python"
    assert Policy().resolved(engine_defaults=ENGINE)["io.hydration_backend"] == "direct"


def test_an_engine_beats_a_driver_and_a_profile_beats_an_engine():
    path = "weights.recovery.verify_bytes"
    resolved = Policy().resolved(
        driver_defaults={path: 1, "io.queue_depth": 1},
        engine_defaults={path: 2, "io.queue_depth": 2},
        profile="qualification",
    )

    assert (resolved[path], resolved["io.queue_depth"]) == (64, 2)


def test_a_default_that_is_not_legal_is_the_mistake_of_its_layer():
    with pytest.raises(PolicyError, match="set of engine defaults has 2 problems") as caught:
        Policy().resolved(engine_defaults={"io.queue": 4, "io.queue_depth": 0})

    assert dict(caught.value.problems)["$.io.queue"] == 'is no leaf of the policy; did you mean "io.queue_depth"?'


def test_layers_that_contradict_each_other_are_refused_with_their_names():
    with pytest.raises(PolicyError, match=r"\$\.io\.verify_mode: .*set by the library layer"):
        Policy().resolved(engine_defaults={"io.hydration_backend": "gds"})


def test_the_profiles_set_legal_leaves():
    for name, values in PROFILES.items():
        assert Policy().evolve(**values).explicit == values.keys(), name


@given(policies())
def test_resolving_twice_changes_nothing(policy):
    once = policy.resolved(driver_defaults=DRIVER, engine_defaults=ENGINE)
    twice = once.policy.resolved(driver_defaults=DRIVER, engine_defaults=ENGINE)

    assert twice.policy == once.policy
    assert {path: value for path, value in flat(once.policy).items() if path in policy.explicit} == {
        path: value for path, value in flat(policy).items() if path in policy.explicit
    }


def test_a_policy_explains_every_leaf():
    lines = Policy(weights=Weights(mode="native")).explain().splitlines()

    assert [line.split()[0] for line in lines] == ["leaf", *(row.path for row in leaves())]
    (mode,) = (line for line in lines if line.startswith("weights.mode "))
    assert mode.split()[1:3] == ['"native"', "user"]
    assert max(map(len, lines)) <= 220


def test_a_policy_explains_one_leaf():
    assert Policy(io=IO(chunk_bytes=2**20)).explain("io.chunk_bytes") == (
        "io.chunk_bytes\n"
        "  value    1048576 (1 MiB)\n"
        "  set by   user\n"
        "  default  67108864 (64 MiB)\n"
        "  type     integer, in bytes\n"
        "  allowed  multiple of 4096, at least 4096\n"
        "  Size of one native I/O request; SGLang has 256 MiB only."
    )
    with pytest.raises(PolicyError, match=r'did you mean "io\.queue_depth"'):
        Policy().explain("io.queue_dept")


def test_the_samples_cover_every_leaf_and_are_valid_with_their_companions():
    samples = list(every_leaf_and_legal_value())

    assert {sample.path for sample in samples} == {row.path for row in leaves()}
    for sample in samples:
        assert flat(sample.policy)[sample.path] == sample.value
        assert sample.policy.explicit == {sample.path, *sample.companions}


def test_the_companions_of_a_sample_are_needed():
    for sample in every_leaf_and_legal_value():
        for left_out in sample.companions:
            kept = {path: value for path, value in sample.companions.items() if path != left_out}
            with pytest.raises(PolicyError):
                Policy().evolve(**{**kept, sample.path: sample.value})


def test_the_samples_have_all_words_and_the_ends_of_ranges():
    values = {}
    for sample in every_leaf_and_legal_value():
        values.setdefault(sample.path, []).append(sample.value)

    assert values["weights.mode"] == ["auto", "native", "recovery", "cache-only-auto", "image"]
    assert values["graphs.asynchronous"] == [True, False]
    assert values["io.queue_depth"] == [1, 4, 64]
    assert values["process.discard"] == [(), ("kv_cache",)]
    assert values["weights.recovery.derived_buffer_max_bytes"] == [0, 64 * 2**20, 2**30]


def test_importing_the_policy_loads_no_parser_and_no_engine():
    code = "import sys; before = set(sys.modules); import coldsnap.policy; print(*set(sys.modules) - before)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()

    assert not {"tomllib", "difflib", "cattrs", "httpx", "torch", "psutil", "google.protobuf"} & set(loaded)
