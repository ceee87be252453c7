"""The one table of environment names."""

import subprocess
import sys
from operator import attrgetter

import pytest

from coldsnap.engines.settings import (
    DIRECTIVE,
    SETTINGS,
    check_user_environment,
    directive_path,
    inherited_environment,
    project,
)
from coldsnap.errors import AdmissionError
from coldsnap.policy import IO, Graphs, Policy, Process, RecoveryWeights, Weights, leaves

# Every name of the requirement, and the engines whose guide names it.
REQUIRED = """
ARTIFACT_DIR ARTIFACT_PREVERIFIED ASYNC_CUDA_GRAPHS ASYNC_CUDA_GRAPHS_ARM_FILE CAPTURE_BACKEND DISCARD_REGIONS
DISK_SLEEP_DIR EXPORT_MODEL_PAYLOAD HIBERNATE_READ_MODE HIBERNATE_REUSE_BLOB HIBERNATE_VERIFY_MODE
HIBERNATE_WRITE_MODE HYDRATION_BACKEND HYDRATION_NATIVE_LIBRARY HYDRATION_NATIVE_SHA256 HYDRATION_QUEUE_DEPTH
KV_CAPACITY_GUARD LIVE_BACKING MODE MODEL_ID MODEL_METADATA_SHA256 MODEL_REVISION PAYLOAD_VALIDATION_COMMAND
PAYLOAD_VALIDATION_RPC_SOCKET PAYLOAD_VALIDATION_RPC_TOKEN_FILE PAYLOAD_VALIDATION_TIMEOUT_SECONDS
PAYLOAD_VALIDATION_TRANSPORT PROCESS_ARTIFACT_ROOT RECOVERY_DERIVED_BUFFER_MAX_BYTES RECOVERY_LOADER_BACKEND
RECOVERY_LOADER_CHUNK_BYTES RECOVERY_LOADER_COLLECTIVE_BYTES RECOVERY_LOADER_DISTRIBUTED RECOVERY_LOADER_QUEUE_DEPTH
RECOVERY_LOADER_STAGING_BYTES RECOVERY_LOADER_TRANSPORT_PIPELINE_DEPTH RECOVERY_LOADER_VERIFY_BYTES
RECOVERY_LOADER_VERIFY_MODEL_BYTES RECOVERY_WEIGHT_SOURCE RESTORE_TRANSPORT_ENVIRONMENT_PATH RUNTIME_DIR
SGLANG_RECOVERY_LOAD_FORMAT SGLANG_STARTUP_PROVIDER SHAPE_CALIBRATION STARTUP_PLAN_MAX_SHORTFALL_BYTES
VLLM_OVERRIDE_CUMEM
""".split()
SGLANG = {
    "ARTIFACT_DIR",
    "ARTIFACT_PREVERIFIED",
    "ASYNC_CUDA_GRAPHS",
    "EXPORT_MODEL_PAYLOAD",
    "LIVE_BACKING",
    "MODE",
    "PROCESS_ARTIFACT_ROOT",
    "RUNTIME_DIR",
    "SGLANG_RECOVERY_LOAD_FORMAT",
    "SGLANG_STARTUP_PROVIDER",
    "SHAPE_CALIBRATION",
}
ROWS = {row.name.removeprefix("COLDSNAP_"): row for row in SETTINGS}


def refusals(env, engine="vllm"):
    with pytest.raises(AdmissionError) as caught:
        check_user_environment(env, engine)
    return caught.value.mismatches


def test_the_table_has_every_required_name_once_and_one_of_this_library():
    names = [row.name for row in SETTINGS]

    assert len(names) == len(set(names))
    assert set(ROWS) == {*REQUIRED, "DIRECTIVE"}


def test_sglang_reads_the_names_of_its_guide():
    assert {name for name, row in ROWS.items() if row.read_by("sglang")} == SGLANG | {"DIRECTIVE"}
    assert all(ROWS[name].owner == "controller" for name in SGLANG)


def test_every_policy_path_is_a_leaf_and_every_row_says_what_it_decides():
    known = {row.path for row in leaves()}
    for row in SETTINGS:
        assert {row.path, row.beside} - {None} <= known, row.name
        assert row.meaning.endswith("."), row.name


@pytest.mark.parametrize(
    ("name", "policy", "text"),
    [
        ("DISCARD_REGIONS", Policy(), "kv_cache"),
        ("DISCARD_REGIONS", Policy(process=Process(discard=())), ""),
        ("HIBERNATE_REUSE_BLOB", Policy(io=IO(reuse_blob=False)), "0"),
        ("HYDRATION_QUEUE_DEPTH", Policy(io=IO(queue_depth=8)), "8"),
        ("HYDRATION_NATIVE_LIBRARY", Policy(), None),
        ("HYDRATION_NATIVE_LIBRARY", Policy(io=IO(native_library="/lib/x.so")), "/lib/x.so"),
        ("RECOVERY_WEIGHT_SOURCE", Policy(), "safetensors"),
        (
            "RECOVERY_WEIGHT_SOURCE",
            Policy(weights=Weights(mode="image", recovery=RecoveryWeights(enabled=False))),
            None,
        ),
        ("RECOVERY_LOADER_BACKEND", Policy(weights=Weights(recovery=RecoveryWeights(loader_backend="mmap"))), "mmap"),
        ("EXPORT_MODEL_PAYLOAD", Policy(), "1"),
        ("EXPORT_MODEL_PAYLOAD", Policy(weights=Weights(mode="recovery")), "1"),
        ("EXPORT_MODEL_PAYLOAD", Policy(weights=Weights(mode="image")), None),
        ("ARTIFACT_PREVERIFIED", Policy(), "0"),
        ("ARTIFACT_PREVERIFIED", Policy(io=IO(verify_mode="preverified")), "1"),
        ("SHAPE_CALIBRATION", Policy(), "0"),
        ("SHAPE_CALIBRATION", Policy(graphs=Graphs(asynchronous=True)), "1"),
        (
            "SHAPE_CALIBRATION",
            Policy(graphs=Graphs(asynchronous=True), process=Process(shape_calibration="disabled")),
            "0",
        ),
        ("MODEL_ID", Policy(), None),
    ],
)
def test_a_leaf_is_written_as_its_name_expects(name, policy, text):
    assert ROWS[name].value(policy) == text


def test_a_default_that_mirrors_a_leaf_is_that_of_the_leaf():
    # Flags of a capture and lists of regions are off in a rank that nobody configures, whatever the policy's default.
    apart = {"DISCARD_REGIONS", "EXPORT_MODEL_PAYLOAD", "RECOVERY_WEIGHT_SOURCE"}
    for name, row in ROWS.items():
        if row.path is not None and name not in apart:
            assert row.default == (row.value(Policy()) or ""), name
            assert attrgetter(row.path)(Policy()) is not None or row.default == "", name


def test_only_rows_that_act_are_projected():
    environment = project(Policy(), "vllm", {DIRECTIVE: "/dev/shm/coldsnap/run/directive.json"})

    assert set(environment) <= {row.name for row in SETTINGS if row.implemented}
    assert environment[DIRECTIVE] == "/dev/shm/coldsnap/run/directive.json"


def test_an_extra_name_that_nothing_reads_is_refused():
    with pytest.raises(AdmissionError) as caught:
        project(Policy(), "sglang", {"COLDSNAP_MODEL_ID": "m", "COLDSNAP_DIRECTIV": "/x", DIRECTIVE: "/y"})

    assert caught.value.mismatches == (
        "COLDSNAP_MODEL_ID is read by vllm only; drop it",
        "COLDSNAP_DIRECTIV is no name of this library; did you mean COLDSNAP_DIRECTIVE?",
    )


def test_every_name_a_user_must_not_set_is_refused_at_once_without_its_value():
    backend = "COLDSNAP_RECOVERY_LOADER_BACKEND"
    env = {
        "COLDSNAP_DIRECTIVE": "hush",
        backend: "hush",
        "COLDSNAP_HYDRATION_BACKENDS": "hush",
        "COLDSNAP_PAYLOAD_VALIDATION_TRANSPORT": "hush",
        "COLDSNAP_ARTIFACT_DIR": "hush",
        "VLLM_PLUGINS": "hush",
    }

    mismatches = refusals(env)

    assert mismatches == (
        "COLDSNAP_ARTIFACT_DIR is set by this library alone; drop it",
        "COLDSNAP_DIRECTIVE is set by this library alone; drop it",
        "COLDSNAP_HYDRATION_BACKENDS is no name of this library; did you mean COLDSNAP_HYDRATION_BACKEND?",
        "COLDSNAP_PAYLOAD_VALIDATION_TRANSPORT has no effect in this version; drop it",
        f"{backend} is set by this library alone; set the policy's weights.recovery.loader_backend instead",
    )
    assert "hush" not in "".join(mismatches)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("row", [row for row in SETTINGS if row.owner == "controller"], ids=lambda row: row.name)
def test_every_name_of_the_controller_is_refused(row, engine):
    (mismatch,) = refusals({row.name: "1"}, engine)

    assert mismatch.startswith(f"{row.name} is set by this library alone")


@pytest.mark.parametrize("row", [row for row in SETTINGS if row.owner == "user"], ids=lambda row: row.name)
def test_a_name_of_the_user_is_taken_where_something_acts_on_it(row):
    for engine in ("vllm", "sglang"):
        if row.implemented and row.read_by(engine):
            check_user_environment({row.name: "1"}, engine)
        else:
            assert len(refusals({row.name: "1"}, engine)) == 1


def test_other_names_are_the_engines_business():
    check_user_environment({"VLLM_LOGGING_LEVEL": "DEBUG", "PATH": "/bin", "NOT_COLDSNAP_MODE": "x"}, "vllm")


def test_a_rank_finds_its_directive_and_other_processes_have_none(monkeypatch):
    assert directive_path({DIRECTIVE: "/run/d.json"}) == "/run/d.json"
    assert directive_path({}) is directive_path({DIRECTIVE: ""}) is None
    monkeypatch.setenv(DIRECTIVE, "/run/own.json")
    assert directive_path() == "/run/own.json"


def test_an_engine_inherits_no_credentials_and_no_names_of_ours():
    caller = {
        "PATH": "/bin",
        "LC_ALL": "C.UTF-8",
        "HF_TOKEN": "hush",
        "AWS_SECRET_ACCESS_KEY": "hush",
        "COLDSNAP_MODE": "capture",
        "PYTHONPATH": "/src",
    }

    assert inherited_environment(caller) == {"PATH": "/bin", "LC_ALL": "C.UTF-8"}
    assert "PATH" in inherited_environment()


def test_the_module_loads_in_a_rank_with_attrs_alone():
    code = (
        "import sys; before = set(sys.modules); import coldsnap.engines.settings; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()

    assert set(loaded) == {"attr", "attrs", "coldsnap"}
