"""The entry point that vLLM calls in each of its processes.

The front end gets a door, and a process that may hold a worker gets hooks that wait for it.

The one rule: in a vLLM that this library did not launch, it does nothing at all; in one that it did, a failure ends
the process. vLLM only logs it when an entry point cannot be *imported*, so that this module imports next to nothing;
what ``register`` raises is not caught.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coldsnap.engines.rank import Operation

__all__ = ["forget", "register"]

# Whoever loads plugins decides what the process is; these frames call ``load_general_plugins`` (see ``contract``).
_ROLES = {
    "vllm.engine.arg_utils": "api",
    "vllm.v1.engine.core": "engine",
    "vllm.v1.worker.worker_base": "worker",
    "vllm.model_executor.models.registry": "inspector",  # a short-lived process that looks at a model class
}

_started = False


def register() -> None:
    """Listen on a control socket, and in the front end put a door before the engine.

    Raises:
        ContractError: vLLM lacks what the plugin relies on, or the directive is for another plugin.
        FormatError: The directive is damaged.
    """
    from coldsnap.engines.settings import directive_path  # noqa: PLC0415  see the rule above

    global _started  # noqa: PLW0603  vLLM may load plugins more than once in a process
    path = directive_path()
    role = _role()
    if path is None or role == "inspector" or _started:
        return
    _started = True
    _start(role, path)


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
            f"this vLLM loads plugins from none of {callers}; the role of process {sys.argv[:1]} is unknown"
        )
    versions = {"coldsnap": importlib.metadata.version("coldsnap")}
    # What is loaded is what is told; a rank imports nothing for the sake of its version.
    versions |= {name: str(sys.modules[name].__version__) for name in ("vllm", "torch") if name in sys.modules}
    operations = _hook_front_end(path) if role == "api" else _hook_worker()
    rank = Rank(role, path, engine="vllm", versions=versions, operations=operations)
    rank.start()
    if (begun := rank.directive.start) is not None and begun.phase == "imported":
        os.register_at_fork(after_in_child=forget)


def forget() -> None:
    """Have a process that was forked with everything imported load its plugins: vLLM would take them for loaded."""
    global _started  # noqa: PLW0603  what it says is about the parent
    _started = False
    sys.modules["vllm.plugins"].plugins_loaded = False  # type: ignore[attr-defined]


def _hook_front_end(path: str) -> Mapping[str, Operation]:
    import functools  # noqa: PLC0415
    from typing import Any  # noqa: PLC0415

    import vllm  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    from coldsnap.engines.vllm import contract  # noqa: PLC0415
    from coldsnap.engines.vllm.frontend import FrontEnd  # noqa: PLC0415
    from coldsnap.engines.vllm.imports import after_import  # noqa: PLC0415
    from coldsnap.engines.vllm.mm_warmup import RENDERER, DeferredWarmup  # noqa: PLC0415
    from coldsnap.keeper.directive import read_directive  # noqa: PLC0415

    contract.report(os.path.dirname(vllm.__file__), version=vllm.__version__).require()

    restored = read_directive(path).operation == "restore"
    warmup = DeferredWarmup(log=_log)
    if restored:  # a process that was thawed has been warm since its capture, and one that is launched is in no hurry
        after_import(RENDERER, warmup.watch)
    front = FrontEnd(closed=restored, opened=warmup.ready)
    original = AsyncLLM.__init__

    @functools.wraps(original)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        front.attach(self)

    AsyncLLM.__init__ = initialise
    return front.operations()


def _log(sentence: str) -> None:
    # One write for a whole line: the processes of an engine share their log.
    sys.stderr.write(f"[coldsnap] front end {os.getpid()}: {sentence}\n")
    sys.stderr.flush()


def _hook_worker() -> Mapping[str, Operation]:
    from coldsnap.engines.vllm.hooks import hook_worker  # noqa: PLC0415

    return hook_worker()
