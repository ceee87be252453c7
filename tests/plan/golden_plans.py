"""The plans whose texts are kept in ``golden/``. Run as a script it writes the texts anew:

    python tests/plan/golden_plans.py

Read the difference before it is committed: it is what users will see. No test and no session runs this.
"""

from functools import partial

import fleet
from attrs import evolve

from coldsnap.errors import AdmissionError
from coldsnap.operation import Delete, Publish, Sleep, Status, Stop, Verify, Wake
from coldsnap.policy import IO, Compatibility, Policy, Process, Weights
from coldsnap.resolve import resolve

PUBLISH = partial(Publish, store="/store", repository="team/packs", reference="registry.example/team/tiny:v1")
IMAGE = Policy(weights=Weights(mode="image"))
GDS = Policy(weights=Weights(mode="native"), io=IO(hydration_backend="gds", verify_mode="preverified"))
TEMPLATE = Policy(compatibility=Compatibility(driver="n580"))
IMPORTED = Policy(process=Process(artifact_scope="target-local"))
HOST_NAMESPACE = Policy(process=Process(namespace="host"))


def _refusal():
    wrong = fleet.cpu_host(criu=None, listening_ports=(8000,), privileges=evolve(fleet.PRIVILEGES, seccomp="filter"))
    try:
        resolve(Policy(), fleet.capture(), fleet.facts(wrong))
    except AdmissionError as refusal:
        return str(refusal)
    raise AssertionError("a host without CRIU was admitted")


def _plan(policy, operation, host):
    return str(resolve(policy, operation, fleet.facts(host)))


def texts():
    """Return every text by its name."""
    cpu, gpu, old = fleet.cpu_host(), fleet.gpu_host(), fleet.gpu_host("580.82.07")
    captured_cpu, captured_gpu = fleet.captured_on(cpu), fleet.captured_on(gpu)
    in_host = fleet.captured_on(cpu, namespace="host", run_dir="/run/coldsnap/tiny/rank")
    return {
        "launch": _plan(Policy(), fleet.launch(), cpu),
        "capture": _plan(Policy(), fleet.capture(), cpu),
        "capture-gpu": _plan(Policy(), fleet.capture(), gpu),
        "capture-gpu-image": _plan(IMAGE, fleet.capture(store="/store"), gpu),
        "capture-host-memory": _plan(Policy(), fleet.capture(spec=fleet.reference(), store="/store", then="keep"), cpu),
        "capture-template": _plan(TEMPLATE, fleet.capture(), cpu),
        "capture-template-gpu": _plan(Policy(), fleet.capture(store="/store"), old),
        "capture-template-imported": _plan(IMPORTED, fleet.capture(store="/store", then="keep"), old),
        "restore-template": _plan(Policy(), fleet.restore(fleet.template_of(cpu)), cpu),
        "restore-template-imported": _plan(Policy(), fleet.restore(fleet.template_of(old, local=True)), old),
        "capture-handle": _plan(Policy(), fleet.capture_handle(then="keep"), cpu),
        "capture-handle-gpu": _plan(Policy(), fleet.capture_handle(then="keep"), gpu),
        "capture-host-namespace": _plan(HOST_NAMESPACE, fleet.capture(), cpu),
        "restore": _plan(Policy(), fleet.restore(captured_cpu), cpu),
        "restore-gpu": _plan(Policy(), fleet.restore(fleet.with_packs(gpu)), gpu),
        "restore-gpu-gds": _plan(GDS, fleet.restore(fleet.with_packs(gpu), store="/store"), gpu),
        "restore-gpu-image": _plan(Policy(), fleet.restore(captured_gpu), gpu),
        "restore-host-namespace": _plan(HOST_NAMESPACE, fleet.restore(in_host), cpu),
        "stop": _plan(Policy(), Stop(fleet.Handle()), cpu),
        "sleep": _plan(Policy(), Sleep(fleet.Handle()), gpu),
        "wake": _plan(Policy(), Wake(fleet.Handle(), tags=("weights",)), gpu),
        "status": _plan(Policy(), Status(fleet.Handle()), cpu),
        "verify": _plan(Policy(), Verify(captured_cpu), cpu),
        "verify-full": _plan(Policy(), Verify(fleet.with_packs(cpu), verify="full", store="/store"), cpu),
        "delete": _plan(Policy(), Delete(fleet.with_packs(cpu), store="/store", roots=("/artifacts",)), cpu),
        "delete-dry-run": _plan(Policy(), Delete(captured_cpu, dry_run=True), cpu),
        "publish": _plan(Policy(), PUBLISH(fleet.with_packs(cpu)), cpu),
        "refusal": _refusal(),
    }


if __name__ == "__main__":
    from pathlib import Path

    for name, text in texts().items():
        (Path(__file__).parent / "golden" / f"{name}.txt").write_text(text + "\n")
