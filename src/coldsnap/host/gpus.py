"""The GPUs of this machine, listed through the CUDA driver in a child, once for each boot and driver.

The one rule: a listing that was kept is used only where everything that it depends on is as it was: the boot, the
driver, the device nodes, the names of the environment that choose devices, and the bindings that asked. To list anew
costs a quarter of a second of every admission; which GPUs there are does not change in between.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from coldsnap.errors import FormatError
from coldsnap.host import private
from coldsnap.host.child import ChildError, command, output
from coldsnap.host.facts import GpuFacts
from coldsnap.host.kernel import KernelFiles
from coldsnap.host.record import digest, from_plain

CACHE = "gpus.json"
CUDA_TIMEOUT_S = 60.0
CHOOSING = ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "NVIDIA_VISIBLE_DEVICES", "PYTHONPATH")
"""Names of the environment on which it depends what the child lists, and whether it can."""


def nvidia_driver(kernel: KernelFiles) -> str | None:
    """Read the version of the loaded NVIDIA kernel driver, closed or open."""
    text = kernel.text("/proc/driver/nvidia/version") or ""
    match = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\b", text, re.MULTILINE)
    return match[1] if match else kernel.text("/sys/module/nvidia/version")


def probe_gpus(kernel: KernelFiles, cache: Path | None = None) -> dict[str, Any]:
    """List the GPUs, or return the listing that still holds; without a trace of NVIDIA nothing is started.

    Args:
        kernel: Where to read ``/proc``, ``/sys`` and ``/dev``.
        cache: Directory of the private records.

    Returns:
        ``known``, ``reason``, ``gpus`` and ``cuda``.
    """
    driver = nvidia_driver(kernel)
    if driver is None and not kernel.exists("/dev/nvidiactl"):
        return {"known": True, "reason": "no NVIDIA driver is loaded", "gpus": [], "cuda": None}
    conditions = _conditions(kernel, driver)
    if (kept := _kept(conditions, cache)) is not None:
        return kept
    answer = _listed()
    if answer["known"] and answer["gpus"]:  # what went wrong may go right the next time
        # A home that cannot be written costs the next probe a quarter of a second, nothing else.
        with contextlib.suppress(OSError):
            private.write(CACHE, {"conditions": conditions, "answer": answer}, cache)
    return answer


def _listed() -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(output(command("coldsnap.host.cuda"), timeout_s=CUDA_TIMEOUT_S))
    except (ChildError, ValueError) as error:
        return {"known": False, "reason": f"listing the GPUs failed: {error}", "gpus": [], "cuda": None}
    if answer["known"] and not answer["gpus"]:
        answer["reason"] = answer["reason"] or "the CUDA driver shows no device"
    return answer


def _conditions(kernel: KernelFiles, driver: str | None) -> str:
    nodes = {}
    for name in kernel.names("/dev"):
        if name.startswith("nvidia"):
            status = os.lstat(kernel.root / "dev" / name)
            nodes[name] = [status.st_ino, status.st_rdev]
    chosen = {name: os.environ.get(name, "") for name in CHOOSING}
    boot_id = kernel.text("/proc/sys/kernel/random/boot_id") or "unknown"
    return digest([str(kernel.root), boot_id, driver, nodes, chosen, sys.executable, _bindings()])


def _bindings() -> str:
    try:
        spec = importlib.util.find_spec("cuda.bindings")
    except ImportError:
        return ""
    return "" if spec is None else str(spec.origin)


def _kept(conditions: str, cache: Path | None) -> dict[str, Any] | None:
    record = private.read(CACHE, cache)
    answer = record.get("answer")
    if record.get("conditions") != conditions or not isinstance(answer, dict):
        return None
    try:
        from_plain(tuple[GpuFacts, ...], answer.get("gpus"), CACHE)
    except FormatError:
        return None
    whole = answer.keys() == {"known", "reason", "gpus", "cuda"} and answer["known"] is True and answer["gpus"]
    return answer if whole else None
