"""Refusals before anything is planned: each by name, all reasons at once."""

import fleet
import pytest
from attrs import evolve

from coldsnap.errors import AdmissionError, CompatibilityError, UnsupportedError
from coldsnap.host.contracts import CONTRACTS
from coldsnap.host.facts import CpuFacts, FeatureResult
from coldsnap.operation import Capture, Placement, UnitPlacement
from coldsnap.policy import Policy
from coldsnap.resolve import resolve


def lacking(**changes):
    return fleet.cpu_host(**changes)


WRONG_HOSTS = {
    "no criu executable was found; install CRIU 4.2": lacking(criu=None),
    "is 3.19, needed 4.2 or newer": lacking(criu=evolve(fleet.CRIU, version=(3, 19))),
    "criu check fails with /opt/criu/criu: no pidfd": lacking(
        criu=evolve(fleet.CRIU, check_ok=False, check_message="no pidfd")
    ),
    "capabilities that CRIU needs are missing: CAP_SYS_ADMIN": lacking(
        privileges=evolve(
            fleet.PRIVILEGES,
            capabilities=tuple(n for n in fleet.NEEDED_CAPABILITIES if n != "CAP_SYS_ADMIN"),
        )
    ),
    "seccomp filter that comes from runc": lacking(
        privileges=evolve(fleet.PRIVILEGES, seccomp="filter", filtered_ancestors=("sh (pid 7)", "runc (pid 1)"))
    ),
    "private pid namespaces cannot be created": lacking(kernel=evolve(fleet.KERNEL, namespaces=("ipc", "mount"))),
    "port 8000 is in use": lacking(listening_ports=(22, 8000)),
}


@pytest.mark.parametrize("operation", ["launch", "capture", "restore"])
@pytest.mark.parametrize("reason", WRONG_HOSTS)
def test_a_host_that_cannot_is_refused_by_name(planned, operation, reason):
    made = {
        "launch": fleet.launch(),
        "capture": fleet.capture(),
        "restore": fleet.restore(fleet.captured_on(fleet.cpu_host()), port=8000),
    }[operation]

    with pytest.raises(AdmissionError) as refusal:
        planned(made, WRONG_HOSTS[reason])

    assert any(reason in mismatch for mismatch in refusal.value.mismatches)


@pytest.mark.parametrize("reason", [reason for reason in WRONG_HOSTS if "port" not in reason])
def test_a_handle_on_a_host_that_cannot_is_refused_by_name(planned, reason):
    with pytest.raises(AdmissionError) as refusal:
        planned(fleet.capture_handle(), WRONG_HOSTS[reason])

    assert any(reason in mismatch for mismatch in refusal.value.mismatches)


def test_all_reasons_are_named_at_once(planned):
    everything = lacking(
        criu=None,
        listening_ports=(8000,),
        privileges=evolve(fleet.PRIVILEGES, seccomp="filter", capabilities=()),
        kernel=evolve(fleet.KERNEL, namespaces=()),
    )

    with pytest.raises(AdmissionError) as refusal:
        planned(fleet.capture(), everything)

    assert len(refusal.value.mismatches) == 5


def test_host_namespaces_need_no_private_ones(planned):
    host = lacking(kernel=evolve(fleet.KERNEL, namespaces=()))

    assert planned(fleet.capture(), host, **{"process.namespace": "host"})["launch"].namespace == "host"


def test_a_host_that_nobody_probed_is_refused(planned):
    elsewhere = Placement(units=(UnitPlacement(host="far", port=8000),))

    with pytest.raises(AdmissionError, match="the facts have no host 'far'"):
        planned(Capture(fleet.engine(), output=fleet.OUTPUT, placement=elsewhere))


def test_several_units_are_refused_by_name(planned):
    units = tuple(UnitPlacement(unit=f"unit-{index}", port=8000 + index) for index in range(2))

    with pytest.raises(UnsupportedError) as refusal:
        planned(Capture(fleet.engine(), output=fleet.OUTPUT, placement=Placement(units=units)))

    assert refusal.value.field == "placement.units"


def test_gpus_that_could_not_be_listed_are_no_basis_for_a_plan(planned):
    host = lacking(gpus_known=False, gpu_reason="libcuda is missing")

    with pytest.raises(AdmissionError, match="libcuda is missing"):
        planned(fleet.capture(), host)


@pytest.mark.parametrize("driver", ["580.82.07", "609.1"])
def test_a_driver_that_only_n580_supports_gets_a_template(planned, driver):
    plan = planned(fleet.capture(), fleet.gpu_host(driver))

    assert plan.driver == "n580"
    assert plan["dump"].after == ("prove",)
    assert not {"LockCuda", "CheckpointCuda"} & {type(step).__name__ for step in plan}


def test_an_engine_that_runs_already_is_no_template_any_more(planned):
    with pytest.raises(UnsupportedError) as refusal:
        planned(fleet.capture_handle(), fleet.gpu_host("580.82.07"))

    assert refusal.value.field == "compatibility.driver"
    assert "launched for it" in refusal.value.works


def test_a_driver_too_old_for_anything_is_refused(planned):
    with pytest.raises(AdmissionError, match="NVIDIA driver 570, needed 580 or newer"):
        planned(fleet.capture(), fleet.gpu_host("570.1"))


def test_a_probed_driver_needs_a_record_of_this_boot(planned):
    probed = {"compatibility.driver": "probed"}

    assert planned(fleet.capture(), fleet.gpu_host("580.82.07"), **probed).driver == "n610"
    with pytest.raises(AdmissionError, match="no qualification record"):
        planned(fleet.capture(), fleet.gpu_host("580.82.07", qualified=False), **probed)


def test_a_gpu_that_is_not_there_is_refused(planned):
    placed = Placement(units=(UnitPlacement(devices=(0, 3), port=8000),))

    with pytest.raises(AdmissionError, match="local has no GPU 3"):
        planned(Capture(fleet.engine(), output=fleet.OUTPUT, placement=placed), fleet.gpu_host(count=2))


@pytest.mark.parametrize("made", [fleet.Launch, fleet.Capture])
def test_gpus_of_a_launch_are_not_chosen_by_a_placement_and_that_is_said(planned, made):
    placed = Placement(units=(UnitPlacement(devices=(1,), port=8000),))
    output = {"output": fleet.OUTPUT} if made is fleet.Capture else {}

    with pytest.raises(UnsupportedError) as refusal:
        planned(made(fleet.engine(), placement=placed, **output), fleet.gpu_host(count=2))

    assert refusal.value.field == "placement.devices"


def test_an_engine_takes_as_many_gpus_as_it_has_workers(planned):
    many = fleet.gpu_host(count=8)

    assert planned(fleet.capture(), many)["lock-cuda"].devices == (0,)
    spec = fleet.engine(args=("--tensor-parallel-size", "2"))
    assert planned(fleet.capture(spec=spec), many)["lock-cuda"].devices == (0, 1)


def test_several_workers_run_eagerly_where_their_graphs_could_not_come_back(planned):
    spec = fleet.engine(args=("--tensor-parallel-size", "2"))

    plan = planned(fleet.capture(spec=spec), fleet.gpu_host(count=2))

    assert "--enforce-eager" in plan["launch"].argv
    assert plan.decision("graphs.policy").effective == "disabled"
    assert "NCCL" in plan.decision("graphs.policy").reason
    assert "--enforce-eager" not in planned(fleet.capture(), GPU)["launch"].argv
    assert "--enforce-eager" not in planned(fleet.capture(spec=spec))["launch"].argv


def test_names_that_look_secret_are_refused_without_their_values(planned):
    spec = fleet.engine(env={"MY_API_KEY": "hf_abcdef", "DB_PASSWORD": "pass-word"})

    with pytest.raises(AdmissionError) as refusal:
        planned(fleet.capture(spec=spec))

    assert [reason.split()[3] for reason in refusal.value.mismatches] == ["DB_PASSWORD", "MY_API_KEY"]
    assert "hf_abcdef" not in str(refusal.value)
    assert planned(fleet.capture(spec=spec), **{"process.secrets": "allow"})["launch"].environment


@pytest.mark.parametrize("model", ["/dev/shm/m", "/dev/../dev/shm/models/m"])
def test_a_model_in_shared_memory_is_refused_because_private_namespaces_hide_it(planned, model):
    spec = fleet.engine(model=model, revision=None)

    with pytest.raises(AdmissionError, match="/dev/shm, and an engine in private namespaces has one of its own"):
        planned(fleet.capture(spec=spec))

    assert planned(fleet.capture(spec=spec), **{"process.namespace": "host"})


def test_what_an_engine_cannot_have_captured_is_refused(planned):
    with pytest.raises(UnsupportedError, match="LoRA|lora"):
        planned(fleet.capture(spec=fleet.engine(args=("--enable-lora",))))


def test_a_running_engine_cannot_be_made_eager_by_a_policy(planned, gpu):
    with pytest.raises(UnsupportedError) as refusal:
        planned(fleet.capture_handle(), gpu, **{"graphs.policy": "disabled"})

    assert refusal.value.field == "graphs.policy"


# -- artifacts ---------------------------------------------------------------------------------------------------------

CPU, GPU = fleet.cpu_host(), fleet.gpu_host()
OTHER_HOSTS = {
    "architecture": (CPU, lacking(kernel=evolve(fleet.KERNEL, architecture="aarch64"))),
    "the processor lacks fma": (CPU, lacking(cpu=CpuFacts(model="another", flags=("avx2", "sse2"), cores=8))),
    "older than 4.2.1, which made the images": (
        CPU,
        lacking(criu=evolve(fleet.CRIU, version=(4, 2, 0), build_digest="sha256:" + "00" * 32)),
    ),
    "there is no CRIU": (CPU, lacking(criu=None)),
    "no GPU placed": (GPU, CPU),
    "compute capability": (
        GPU,
        fleet.gpu_host(gpus=tuple(evolve(gpu, compute_capability="8.0") for gpu in GPU.gpus)),
    ),
    "memory class": (GPU, fleet.gpu_host(gpus=tuple(evolve(gpu, capacity_class_bytes=80 << 30) for gpu in GPU.gpus))),
    "GPU: captured": (GPU, fleet.gpu_host(gpus=tuple(evolve(gpu, name="NVIDIA B200") for gpu in GPU.gpus))),
    "is too old, the capture had 620.1": (fleet.gpu_host("620.1"), GPU),
    "is too old, the contract needs 610": (GPU, fleet.gpu_host("580.82.07")),
}


@pytest.mark.parametrize("reason", OTHER_HOSTS)
def test_an_artifact_of_another_machine_is_refused_by_name(planned, reason):
    captured, here = OTHER_HOSTS[reason]

    with pytest.raises(CompatibilityError) as refusal:
        planned(fleet.restore(fleet.captured_on(captured)), here)

    assert any(reason in mismatch for mismatch in refusal.value.mismatches), refusal.value.mismatches


def test_another_kernel_is_a_note_unless_it_must_be_exact(planned):
    here = lacking(kernel=evolve(fleet.KERNEL, release="6.19.0"))
    artifact = fleet.captured_on(CPU)

    plan = planned(fleet.restore(artifact), here)

    assert "kernel 6.12.0 at capture, 6.19.0 here" in plan.decision("compatibility").reason
    with pytest.raises(CompatibilityError, match="kernel release"):
        planned(fleet.restore(artifact), here, **{"compatibility.kernel": "exact"})


def test_a_newer_build_of_criu_is_a_note_unless_it_must_be_exact(planned):
    here = lacking(criu=evolve(fleet.CRIU, version=(4, 3, 0), build_digest="sha256:" + "00" * 32))
    artifact = fleet.captured_on(CPU)

    plan = planned(fleet.restore(artifact), here)

    assert "another build" in plan.decision("compatibility").reason
    with pytest.raises(CompatibilityError, match="another build"):
        planned(fleet.restore(artifact), here, **{"compatibility.kernel": "exact"})


def test_the_captured_driver_is_a_floor_unless_the_policy_says_otherwise(planned):
    artifact = fleet.captured_on(fleet.gpu_host("620.1"))

    plan = planned(fleet.restore(artifact), GPU, **{"compatibility.enforce_captured_driver_floor": False})

    assert plan["admit-artifact"].enforce_captured_driver_floor is False


def test_a_feature_that_the_artifact_needs_must_have_passed(planned):
    artifact = fleet.captured_on(
        GPU, requires=fleet.format9.Requires(features=tuple(sorted(CONTRACTS["n610"].features)))
    )
    record = evolve(
        GPU.qualification,
        features=(FeatureResult(name="cuda-checkpoint-roundtrip", status="failed", reason="it hung"),),
    )

    probed = {"compatibility.driver": "probed"}
    assert planned(fleet.restore(artifact), GPU, **probed)
    with pytest.raises(CompatibilityError, match="cuda-checkpoint-roundtrip has not passed"):
        planned(fleet.restore(artifact), evolve(GPU, qualification=record), **probed)
    assert planned(fleet.restore(artifact), evolve(GPU, qualification=None)), "the driver's number vouches for it"


@pytest.mark.parametrize(("captured", "asked"), [("private", "host"), ("host", "private")])
def test_an_artifact_comes_back_in_the_namespaces_of_its_capture(planned, captured, asked):
    artifact = fleet.captured_on(CPU, namespace=captured, run_dir="/run/coldsnap/tiny/rank")

    with pytest.raises(AdmissionError, match=f"process.namespace = '{captured}'"):
        planned(fleet.restore(artifact), **{"process.namespace": asked})


def test_in_host_namespaces_a_run_directory_cannot_be_chosen(planned):
    artifact = fleet.captured_on(CPU, namespace="host", run_dir="/run/coldsnap/tiny/rank")
    host = {"process.namespace": "host"}

    assert planned(fleet.restore(artifact), **host)
    assert planned(fleet.restore(artifact, placement=fleet.local(port=8001, name="tiny")), **host)
    with pytest.raises(AdmissionError, match="comes back there, not in /run/coldsnap/another"):
        planned(fleet.restore(artifact, placement=fleet.local(port=8001, name="another")), **host)


def test_an_artifact_without_cuda_state_gets_no_cuda_step_on_a_host_with_gpus(planned):
    plan = planned(fleet.restore(fleet.captured_on(CPU)), GPU)

    assert not [step for step in plan if "cuda" in step.id]
    assert plan.decision("cuda steps").reason == "the artifact was captured on a host without GPU"


def test_an_artifact_of_one_gpu_takes_one_of_many(planned):
    plan = planned(fleet.restore(fleet.captured_on(GPU)), fleet.gpu_host(count=8))

    assert plan["restore-cuda"].devices == (0,)


def test_a_restore_takes_the_gpus_that_its_placement_names(planned):
    placement = fleet.local(port=8001, devices=(5,))

    plan = planned(fleet.restore(fleet.captured_on(GPU), placement=placement), fleet.gpu_host(count=8))

    assert (plan["restore-cuda"].devices, plan["restore-cuda"].chosen) == ((5,), True)
    assert not planned(fleet.restore(fleet.captured_on(GPU)), fleet.gpu_host(count=8))["restore-cuda"].chosen


def test_a_restore_to_more_gpus_than_it_was_captured_on_is_refused(planned):
    placement = fleet.local(port=8001, devices=(1, 5))

    with pytest.raises(AdmissionError, match="captured on 1 GPUs, the placement names 2; name as many"):
        planned(fleet.restore(fleet.captured_on(GPU), placement=placement), fleet.gpu_host(count=8))


def test_every_mismatch_of_an_artifact_is_named_at_once(planned):
    here = lacking(
        kernel=evolve(fleet.KERNEL, release="6.19.0"),
        cpu=CpuFacts(model="another", flags=(), cores=8),
        criu=evolve(fleet.CRIU, version=(4, 2, 0), build_digest="sha256:" + "00" * 32),
        listening_ports=(8001,),
    )

    with pytest.raises(CompatibilityError) as refusal:
        planned(fleet.restore(fleet.captured_on(CPU)), here, **{"compatibility.kernel": "exact"})

    assert len(refusal.value.mismatches) == 4


def test_facts_of_another_fleet_make_a_plan_for_it():
    far = evolve(fleet.cpu_host(), name="far")
    placed = Placement(units=(UnitPlacement(host="far", port=8000),))

    plan = resolve(Policy(), Capture(fleet.engine(), output=fleet.OUTPUT, placement=placed), fleet.facts(far))

    assert plan["admit-host"].host == "far"
