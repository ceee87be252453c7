"""Try out on this machine what the drivers rely on, once a boot, and keep the outcome.

The one rule: a feature has passed only when it was seen to work here, in this boot, with this driver and these
devices; ``probe()`` reads the record and ignores it anywhere else.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coldsnap.errors import AdmissionError
from coldsnap.host import private
from coldsnap.host.canary import Canary, CanaryError
from coldsnap.host.child import ChildError, command, output
from coldsnap.host.contracts import FEATURES, MINIMUM_CRIU_VERSION
from coldsnap.host.facts import CriuFacts, FeatureResult, HostFacts, QualificationRecord
from coldsnap.host.freeze import FreezeError, dump, restore
from coldsnap.host.kernel import KernelFiles
from coldsnap.host.probe import QUALIFICATION, probe_host
from coldsnap.host.record import from_plain, to_plain

ALWAYS_UNSUPPORTED = {
    "cuda-uvm-checkpoint": "managed memory is not part of this library's captures",
    "cuda-vmm-exported-handle-checkpoint": "the driver cannot checkpoint memory whose handle was exported",
}
CUDA = tuple(name for name in FEATURES if name.startswith("cuda-") and name not in ALWAYS_UNSUPPORTED)


def qualify_host(
    *,
    timeout_s: float = 60.0,
    criu: str | Path | None = None,
    kernel: KernelFiles | None = None,
    cache: Path | None = None,
    tools: Path | None = None,
) -> QualificationRecord:
    """Run every live feature probe in throw-away processes and keep the record for ``probe()``.

    Args:
        timeout_s: Deadline for all probes together, s.
        criu: The CRIU executable; otherwise the one ``probe()`` would find.
        kernel: Where to read ``/proc`` and ``/sys``.
        cache: Directory for private records, ``~/.cache/coldsnap`` by default.
        tools: Where ``tools/get_criu.py`` installed.

    Raises:
        AdmissionError: The GPUs could not be listed, or the cache directory is not private.
        OSError: The record cannot be written.
    """
    kernel = kernel or KernelFiles()
    host = probe_host(name="local", paths=(), criu=criu, ports=(), kernel=kernel, cache=cache, tools=tools)
    if not host.gpus_known:
        raise AdmissionError("this host cannot be qualified before its GPUs are known", [host.gpu_reason])
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="coldsnap-qualify-", ignore_cleanup_errors=True) as directory:
        found = {result.name: result for result in _probes(host, Path(directory), deadline)}
    record = QualificationRecord(
        boot_id=host.boot_id,
        nvidia_driver=host.nvidia_driver,
        devices=tuple(gpu.uuid for gpu in host.gpus),
        criu_build_digest=host.criu.build_digest if host.criu else None,
        features=tuple(found.get(name) or _not_probed(name) for name in FEATURES),
        created_unix_ns=time.time_ns(),
    )
    private.write(QUALIFICATION, to_plain(record), cache)
    return record


def _not_probed(name: str) -> FeatureResult:
    if reason := ALWAYS_UNSUPPORTED.get(name):
        return FeatureResult(name=name, status="unsupported", reason=reason)
    return FeatureResult(
        name=name, status="unqualified", reason="needs a patched NCCL, which this library does not use"
    )


def _probes(host: HostFacts, directory: Path, deadline: float) -> list[FeatureResult]:
    criu = host.criu if host.criu and _usable(host.criu) else None
    return [*criu_probes(criu, directory, deadline), *_cuda_probes(host, criu, directory, deadline)]


def _usable(criu: CriuFacts) -> bool:
    return criu.check_ok and criu.version >= MINIMUM_CRIU_VERSION


def criu_probes(criu: CriuFacts | None, directory: Path, deadline: float) -> list[FeatureResult]:
    """Dump and restore a small process: as a template (it runs on) and as a tree (it is gone).

    Args:
        criu: A CRIU that passed its check.
        directory: An empty directory.
        deadline: ``time.monotonic()`` by which it must be done.
    """
    template, tree = "criu-process-template", "criu-process-tree"
    if criu is None:
        reason = "no CRIU that is new enough and passes its check"
        return [FeatureResult(name=name, status="unsupported", reason=reason) for name in (template, tree)]
    # One process for each: only our own child is reaped by us, and a pid 1 that never reaps would keep a pid for ever.
    with Canary(directory / template, deadline) as canary:
        first = _attempt(template, lambda: _template(criu.path, canary, directory / "template-images"))
    with Canary(directory / tree, deadline) as canary:
        return [first, _attempt(tree, lambda: _tree(criu.path, canary, directory / "tree-images"))]


def _template(criu: str, canary: Canary, images: Path) -> None:
    before = canary.ask("digest")
    dump(criu, canary, images, leave_running=True)
    _same(canary, before)
    canary.kill()
    if not canary.gone():
        raise FreezeError(f"pid {canary.pid} was still taken after its death", phase="exit")
    # The image is of a moment with fewer answers; the directory goes back to it, as the process does.
    canary.rewind(1)
    restore(criu, canary, images)
    _same(canary, before)


def _tree(criu: str, canary: Canary, images: Path) -> None:
    before = canary.ask("digest")
    dump(criu, canary, images)
    restore(criu, canary, images)
    _same(canary, before)


def _same(canary: Canary, before: str) -> None:
    if (now := canary.ask("digest")) != before:
        raise CanaryError(f"compare: memory was {before}, is {now}")


def _attempt(name: str, probe: Callable[[], None]) -> FeatureResult:
    try:
        probe()
    except (CanaryError, FreezeError) as error:
        phase = getattr(error, "phase", "") or str(error).split(":")[0]
        return FeatureResult(name=name, status="failed", reason=str(error), failure_phase=phase)
    return FeatureResult(name=name, status="passed")


def _cuda_probes(host: HostFacts, criu: CriuFacts | None, directory: Path, deadline: float) -> list[FeatureResult]:
    if not host.gpus:
        reason = f"no GPU: {host.gpu_reason}"
        return [FeatureResult(name=name, status="unsupported", reason=reason) for name in CUDA]
    left = max(deadline - time.monotonic(), 1.0)
    arguments = command("coldsnap.host.cuda_probes", str(directory), f"{left:.1f}", criu.path if criu else "")
    try:
        text = output(arguments, timeout_s=left + 5.0)
        plain: list[Any] = json.loads(text)
    except (ChildError, ValueError) as error:
        return [FeatureResult(name=name, status="failed", reason=str(error), failure_phase="start") for name in CUDA]
    results: list[FeatureResult] = [from_plain(FeatureResult, item, "cuda_probes") for item in plain]
    return results
