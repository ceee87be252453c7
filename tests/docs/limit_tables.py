"""The tables of docs/limits.md, from the tables of the code; run this file to print them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))

import fleet
from attrs import evolve

from coldsnap.behaviour import ANY, WORKING
from coldsnap.drivers.findings import KINDS
from coldsnap.engines.argument_limits import MODEL_LIMITS
from coldsnap.engines.sglang import arguments as sglang_arguments
from coldsnap.engines.specs import spec_from_text
from coldsnap.engines.vllm import arguments
from coldsnap.keeper.handle import Engine
from coldsnap.operation import Capture, Placement, Sleep, UnitPlacement, local
from coldsnap.policy import Policy, leaves
from coldsnap.resolve import resolve


def code(*texts):
    return " ".join(f"`{text}`" for text in texts)


def value(item):
    """Return a value as TOML writes it."""
    if isinstance(item, str):
        return f'"{item}"'
    return str(list(item) if isinstance(item, tuple) else item).lower()


def policy_rows():
    """Leaves of which some value, or every value, is refused when somebody sets it."""
    for row in leaves():
        working = WORKING.get(row.path, ())
        if working is not ANY:
            yield code(row.path), code(*map(value, working)) if working else "leaving it unset"


def limit_rows(limits):
    """Arguments, or names of the environment."""
    for limit in limits:
        names = code(*limit.names)
        if limit.allowed:
            names += f" (but for {code(*limit.allowed)})"
        yield names, limit.why, limit.works


def model_rows():
    """Keys of config.json."""
    for limit in MODEL_LIMITS:
        yield code(limit.key), limit.why, limit.works


def table(rows):
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows)


def finding_rows():
    """Kinds of findings of the doctor."""
    for name, kind in KINDS.items():
        yield code(name), kind.severity, kind.found, kind.why, kind.remedy


def planned(operation, host=None, **leaves_set):
    return resolve(Policy().evolve(**leaves_set), operation, fleet.facts(host or fleet.cpu_host()))


def placed(**options):
    return Capture(fleet.engine(), output=fleet.OUTPUT, placement=local(port=8000, **options))


def host(**changes):
    return lambda: planned(fleet.capture(), fleet.cpu_host(**changes))


def engine(gpu=False, **changes):
    return lambda: planned(fleet.capture(spec=fleet.engine(**changes)), fleet.gpu_host() if gpu else fleet.cpu_host())


def missing(capability):
    return tuple(name for name in fleet.NEEDED_CAPABILITIES if name != capability)


def elsewhere(**changes):
    there = fleet.cpu_host(**changes)
    return lambda: planned(fleet.restore(fleet.captured_on(fleet.cpu_host())), there)


TWO_UNITS = Placement(units=tuple(UnitPlacement(unit=f"unit-{n}", port=8000 + n) for n in range(2)))

# What stands in the first column of the tables of the document, and how it comes about.
SITUATIONS = {
    "no CRIU": host(criu=None),
    "CRIU older than 4.2": host(criu=evolve(fleet.CRIU, version=(4, 1, 1))),
    "a kernel that CRIU cannot work with": host(
        criu=evolve(fleet.CRIU, check_ok=False, check_message="Kernel has no CONFIG_CHECKPOINT_RESTORE")
    ),
    "an unprivileged caller": host(
        privileges=evolve(fleet.PRIVILEGES, euid=1000, capabilities=missing("CAP_SYS_ADMIN"))
    ),
    "a caller under seccomp": host(
        privileges=evolve(fleet.PRIVILEGES, seccomp="filter", filtered_ancestors=("python (pid 7)", "sh (pid 1)"))
    ),
    "no private namespaces": host(kernel=evolve(fleet.KERNEL, namespaces=("user",))),
    "a port in use": host(listening_ports=(8000,)),
    "GPUs that could not be listed": host(gpus_known=False, gpu_reason="cuda-bindings is not installed"),
    "an engine that runs already, where the driver is n580": lambda: planned(
        fleet.capture_handle(), fleet.gpu_host("580.82.07")
    ),
    '`compatibility.driver = "n580"` below NVIDIA driver 580': lambda: planned(
        fleet.capture(), fleet.gpu_host("570.124.06"), **{"compatibility.driver": "n580"}
    ),
    "what only templates do, with the driver n610": lambda: planned(
        fleet.capture(), **{"process.artifact_scope": "target-local"}
    ),
    "NVIDIA driver before 580": lambda: planned(fleet.capture(), fleet.gpu_host("570.124.06")),
    '`compatibility.driver = "probed"` without a record of this boot': lambda: planned(
        fleet.capture(), fleet.gpu_host("580.82.07", qualified=False), **{"compatibility.driver": "probed"}
    ),
    "a GPU that is not there": lambda: planned(placed(devices=(2,)), fleet.gpu_host(count=2)),
    "several hosts, or several units": lambda: planned(
        Capture(fleet.engine(), output=fleet.OUTPUT, placement=TWO_UNITS)
    ),
    "a name in `env=` that looks secret": engine(env={"SERVICE_PASSWORD": "x"}),
    "a `COLDSNAP_` name in `env=` that this library sets": engine(env={"COLDSNAP_DIRECTIVE": "/x"}),
    "a path in `/dev/shm`": engine(args=("--download-dir", "/dev/shm/models")),
    "expandable segments, on a GPU": engine(gpu=True, env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "another architecture": elsewhere(kernel=evolve(fleet.KERNEL, architecture="aarch64")),
    "a processor without a flag of the captured one": elsewhere(
        cpu=evolve(fleet.cpu_host().cpu, flags=("avx2", "sse2"))
    ),
    "an older CRIU than the captured one": elsewhere(
        criu=evolve(fleet.CRIU, version=(4, 2, 0), build_digest="sha256:" + "12" * 32)
    ),
    "a host without the GPU of the capture": lambda: planned(
        fleet.restore(fleet.captured_on(fleet.gpu_host())), fleet.cpu_host()
    ),
    "another `process.namespace` than at capture": lambda: planned(
        fleet.restore(fleet.captured_on(fleet.cpu_host())), **{"process.namespace": "host"}
    ),
}


def sglang_of(artifact):
    document = artifact.descriptor
    return evolve(artifact, descriptor=evolve(document, engine=evolve(document.engine, kind="sglang")))


# What stands in the first column of the first table, and how it comes about.
NOT_HERE = {
    "engines other than vLLM and SGLang": lambda: spec_from_text('{"kind":"llama.cpp","model":"tiny"}'),
    "an engine that ColdSnap did not start: it has no keeper, no control socket, perhaps io_uring": lambda: (
        Engine.attach("/proc/self")
    ),
    "weights outside the process image for an engine without a memory provider, or with several workers of vLLM": (
        lambda: planned(
            fleet.capture(spec=fleet.engine(args=("-tp", "2"))), fleet.gpu_host(count=2), **{"weights.mode": "native"}
        )
    ),
    "sleep of an engine without a memory provider": lambda: planned(Sleep(fleet.Handle())),
    "a warm restore of an artifact with its weights in the image": lambda: planned(
        fleet.restore(fleet.captured_on(fleet.cpu_host()), state="warm")
    ),
    "a template (n580) of an engine that runs already": SITUATIONS[
        "an engine that runs already, where the driver is n580"
    ],
    "several hosts; several units": SITUATIONS["several hosts, or several units"],
    "`weights.native.materialize` with SGLang, whose memory changes hands in its scheduler's own pass alone": lambda: (
        planned(
            fleet.restore(sglang_of(fleet.with_packs(fleet.cpu_host()))), **{"weights.native.materialize": "required"}
        )
    ),
    "`weights.native.materialize` with a template (n580), whose engine repacks what its load left": lambda: planned(
        fleet.restore(fleet.template_of(fleet.cpu_host())), **{"weights.native.materialize": "required"}
    ),
}

if __name__ == "__main__":
    from coldsnap.errors import ColdSnapError

    print(table(policy_rows()), table(limit_rows(arguments.ARGUMENTS.rows)), sep="\n\n")
    print(table(limit_rows(arguments.ENVIRONMENT.rows)), table(model_rows()), sep="\n\n")
    print(table(limit_rows(sglang_arguments.ARGUMENTS.rows)), table(limit_rows(sglang_arguments.ENVIRONMENT.rows)))
    print(table(finding_rows()))
    for title, happens in SITUATIONS.items():
        try:
            print(f"\n{title}: nothing refused: {happens()}")
        except ColdSnapError as error:
            print(f"\n{title}: {type(error).__name__}\n{error}")
