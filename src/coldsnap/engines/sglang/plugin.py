"""The entry point that SGLang calls in each of its processes.

The one rule: in an SGLang that this library did not launch, it does nothing at all; in one that it did, a failure ends
the process. SGLang logs what an entry point raises and serves on without it, so that the process is ended from here.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coldsnap.engines.rank import Operation

__all__ = ["EXIT", "abort", "register"]

EXIT = 70
"""EX_SOFTWARE of sysexits(3): the exit status of a process that could not be hooked."""

# Whoever loads plugins decides what the process is; these modules call ``load_plugins`` (see ``contract``).
_ROLES = {
    "sglang.launch_server": "api",
    "sglang.cli.serve": "api",
    "sglang.srt.entrypoints.engine": "api",
    "sglang.srt.managers.scheduler": "worker",
    "sglang.srt.managers.detokenizer_manager": "detokenizer",
}

_started = False


def register() -> None:
    """Listen on a control socket, and hook what the role of this process needs.

    Whatever stands in the way ends the process with status :data:`EXIT` and a sentence on standard error: SGLang lacks
    what the plugin relies on, the directive is damaged or for another plugin, a setting is wrong.
    """
    from coldsnap.engines.settings import directive_path  # noqa: PLC0415  see the rule above

    global _started  # noqa: PLW0603  the entry point may be loaded under two names
    path = directive_path()
    if path is None or _started:
        return
    _started = True
    try:
        _start(_role(), path)
    except BaseException as error:  # noqa: BLE001  anything at all: SGLang would serve on
        abort(error)


def abort(error: BaseException) -> NoReturn:
    """End the process, and say why."""
    sys.stderr.write(f"[coldsnap] process {os.getpid()} ends: {type(error).__name__}: {error}\n")
    sys.stderr.flush()
    os._exit(EXIT)


def _role() -> str:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  the callers are what tells the processes apart
    while frame is not None:
        if role := _ROLES.get(frame.f_globals.get("__name__", "")):
            return role
        if (spec := frame.f_globals.get("__spec__")) and (role := _ROLES.get(spec.name)):
            return role  # started with -m, and so called __main__
        frame = frame.f_back
    return ""


def _start(role: str, path: str) -> None:
    import importlib.metadata  # noqa: PLC0415

    from coldsnap.engines.rank import Rank  # noqa: PLC0415
    from coldsnap.errors import ContractError  # noqa: PLC0415

    if not role:
        callers = ", ".join(sorted(_ROLES))
        raise ContractError(
            f"this SGLang loads plugins from none of {callers}; the role of process {sys.argv[:1]} is unknown"
        )
    versions = {name: importlib.metadata.version(name) for name in ("coldsnap", "sglang", "torch")}
    operations = _hook(role, path)
    Rank(role, path, engine="sglang", versions=versions, operations=operations).start()


def _hook(role: str, path: str) -> Mapping[str, Operation]:
    from coldsnap.engines.sglang.processes import hook_front_end, hook_worker  # noqa: PLC0415

    if role == "api":
        return hook_front_end(path)
    return hook_worker(path) if role == "worker" else {}
