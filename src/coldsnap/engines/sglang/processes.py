"""What the plugin puts into the front end and into each scheduler.

The one rule: a process gets the hooks of its own role alone, since SGLang imports the module of every target.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from typing import Any

from coldsnap.engines.rank import Operation
from coldsnap.engines.sglang import cuda
from coldsnap.engines.sglang.frontend import FrontEnd
from coldsnap.engines.sglang.graphs import Graphs
from coldsnap.engines.sglang.hooking import Hook, Hooking
from coldsnap.engines.sglang.meeting import Meeting
from coldsnap.engines.sglang.nccl import Communicators
from coldsnap.engines.sglang.plugin import abort
from coldsnap.errors import EngineError
from coldsnap.keeper.control import request_control

__all__ = ["hook_front_end", "hook_worker"]

_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_TRANSITION_S = 3600.0  # as long as the slowest disk takes; whoever asked has a deadline of his own


def hook_front_end(directive_path: str) -> Mapping[str, Operation]:
    """Check SGLang's sources, hook the front end, and return what it answers.

    Raises:
        ContractError: SGLang lacks what the plugin relies on.
    """
    import sglang  # noqa: PLC0415

    from coldsnap.engines.sglang import contract, load_format  # noqa: PLC0415

    (tree,) = sglang.__path__
    contract.report(tree, version=getattr(sglang, "__version__", "")).require()
    front = FrontEnd()
    doors = Doors(front, os.path.dirname(directive_path))
    load_format.announce()
    _hooking().register((*doors.hooks(), *load_format.hooks()))
    return {**front.operations(), **doors.meeting.operations()}


class Doors:
    """The front end's part in a release or resume.

    Args:
        front: The front end.
        directory: The directory of the directive.
    """

    def __init__(self, front: FrontEnd, directory: str) -> None:
        self._front = front
        self._directory = directory
        self._meeting_asks = False
        self.meeting = Meeting(self._workers, self._ask)

    def hooks(self) -> tuple[Hook, ...]:
        """Return what is hooked."""
        return (
            Hook(target=f"{_TOKENIZER}.__init__", wrapper=self._front.made),
            Hook(
                target=f"{_TOKENIZER}.generate_request",
                wrapper=self._front.generate_request,
                parameters=("obj", "request"),
            ),
            *(
                Hook(target=f"{_TOKENIZER}.{name}", wrapper=self._occupation, parameters=("obj", "request"))
                for name in ("release_memory_occupation", "resume_memory_occupation")
            ),
        )

    async def _occupation(self, original: Any, tokenizer: Any, obj: Any, request: Any = None) -> None:
        """Let a user's request through, and fail it with what the schedulers say they could not do."""
        import asyncio  # noqa: PLC0415

        await original(tokenizer, obj, request)
        if request is not None:
            await asyncio.to_thread(self._require_done)

    def _require_done(self) -> None:
        replies = request_control(self._directory, "transition", roles=["worker"], timeout_s=30.0)
        errors = sorted({str(reply["error"]) for reply in replies.values() if reply.get("error")})
        if errors:
            raise EngineError("; ".join(errors))

    def _workers(self) -> set[str]:
        names = os.listdir(os.path.join(self._directory, "control"))
        return {name.removesuffix(".sock") for name in names if name.startswith("worker.") and name.endswith(".sock")}

    def _ask(self, kind: str) -> None:
        from sglang.srt.managers.io_struct import (  # noqa: PLC0415
            ReleaseMemoryOccupationReqInput,
            ResumeMemoryOccupationReqInput,
        )

        tokenizer = self._front.tokenizer
        if kind == "release":
            asked = tokenizer.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=None))
        else:
            asked = tokenizer.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=None))
        self._front.run(asked, _TRANSITION_S)


def hook_worker(directive_path: str) -> Mapping[str, Operation]:
    """Hook the scheduler of this process, and return what its rank answers.

    Raises:
        ContractError: SGLang lacks what the plugin hooks.
    """
    from coldsnap.engines.sglang import load_format  # noqa: PLC0415
    from coldsnap.engines.sglang.agreement import over_group  # noqa: PLC0415
    from coldsnap.engines.sglang.boundary import Boundary  # noqa: PLC0415
    from coldsnap.engines.sglang.live import Live  # noqa: PLC0415
    from coldsnap.engines.sglang.loading import is_asked_for, loads  # noqa: PLC0415
    from coldsnap.engines.sglang.updating import Updates  # noqa: PLC0415
    from coldsnap.engines.sglang.worker import Resident  # noqa: PLC0415
    from coldsnap.engines.vllm.ordered import ordered  # noqa: PLC0415

    directory = os.path.dirname(directive_path)

    def meet(kind: str, worker: str) -> None:
        request_control(directory, "meet", roles=["api"], timeout_s=_TRANSITION_S, kind=kind, worker=worker)

    resident = Resident(meet=meet, settle=loads.settle)
    device = UnderScheduler(resident)
    boundary = Boundary(
        resident,
        Live(resident, device.identity),
        exchange=lambda manager: over_group(manager.tp_cpu_group),
        before=device.discard_graphs,
        leave=device.end_communicators,
        enter=device.begin_communicators,
        after=device.capture_graphs,
        abort=abort,
    )
    arrivals = Arrivals(resident, boundary, device)
    observing = loads.hooks() if is_asked_for() or ordered.exports() else ()
    _hooking().register((*arrivals.hooks(), *Updates(resident).hooks(), *observing, *load_format.hooks()))
    about_models = {**loads.operations(), **ordered.operations(), "digests": arrivals.digests}
    about_models["identity"] = device.identify
    return {**resident.operations(), **about_models}


class UnderScheduler:
    """What a scheduler is, and its graphs and communicators; on a processor there are none of these.

    Args:
        resident: Knows the worker's name.

    Attributes:
        runners: SGLang's model runners, by the role of their model.
    """

    def __init__(self, resident: Any) -> None:
        self._resident = resident
        self.runners: dict[str, Any] = {}

    @functools.cached_property
    def _both(self) -> tuple[Graphs, Communicators] | None:
        import torch.distributed as dist  # noqa: PLC0415  only the engine's environment has it

        device = cuda.of_process()
        if device is None:
            return None
        graphs = Graphs(runners=lambda: self.runners, workers=dist.get_world_size, device=device)
        return graphs, Communicators(groups=device.groups, transport=device)

    def identity(self) -> Mapping[str, Any]:
        """Describe the scheduler."""
        from coldsnap.engines.sglang.identity import identity_of  # noqa: PLC0415  torch is there once a model is

        return identity_of(self.runners["target"], worker=self._resident.name, rank=self._resident.rank)

    def identify(self, _request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer with what the scheduler is, and the digest of that."""
        if "target" not in self.runners:
            return {"skipped": True}
        from coldsnap.engines.sglang.identity import digest_of  # noqa: PLC0415

        identity = self.identity()
        return {"identity": identity, "identity_sha256": digest_of(identity)}

    def require_replaceable(self) -> None:
        """Demand that what would be destroyed can be made again."""
        if self._both:
            self._both[0].require_replaceable()

    def discard_graphs(self) -> None:
        """Destroy the graphs."""
        if self._both:
            self._both[0].discard()

    def capture_graphs(self) -> None:
        """Capture them again."""
        if self._both:
            self._both[0].capture()

    def end_communicators(self) -> None:
        """End the communicators."""
        if self._both:
            self._both[1].prepare()

    def begin_communicators(self) -> None:
        """Begin them again."""
        if self._both:
            self._both[1].restore()


class Arrivals:
    """The models of a scheduler, as they come.

    Args:
        resident: Who takes them.
        boundary: Where their memory changes hands.
        device: Where they run.
    """

    def __init__(self, resident: Any, boundary: Any, device: UnderScheduler) -> None:
        self._resident = resident
        self._boundary = boundary
        self._device = device

    def hooks(self) -> tuple[Hook, ...]:
        """Return what is hooked."""
        return (
            Hook(target=f"{_RUNNER}.load_model", wrapper=self._loaded),
            Hook(
                target=f"{_UPDATER}.release_memory_occupation",
                wrapper=self._boundary.release,
                parameters=("recv_req",),
            ),
            Hook(
                target=f"{_UPDATER}.resume_memory_occupation", wrapper=self._boundary.resume, parameters=("recv_req",)
            ),
        )

    def digests(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer with the digest of each parameter and buffer, of all models by role."""
        if not self._resident.models:
            return {"skipped": True}
        from torch.nn import ModuleDict  # noqa: PLC0415

        from coldsnap.engines.weights.digests import digests_of  # noqa: PLC0415  torch is there once a model is

        if self._resident.memory is not None:
            self._resident.require_mapped()
        return digests_of(lambda: ModuleDict(self._resident.models))(request)

    def _loaded(self, original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, *args, **kwargs)
        path = str(runner.model_config.model_path)
        role = self._resident.add_model(runner.model, draft=bool(runner.is_draft_worker), path=path)
        self._device.runners[role] = runner
        if runner.memory_saver_adapter.enabled and self._resident.memory is None:
            self._settle_in()
        _log(f"has the {role} model{'' if self._resident.memory else ', in memory that cannot be released'}")
        return result

    def _settle_in(self) -> None:
        import torch.distributed as dist  # noqa: PLC0415

        from coldsnap.engines.sglang.memory import of_process  # noqa: PLC0415
        from coldsnap.engines.sglang.worker import nowhere  # noqa: PLC0415
        from coldsnap.engines.weights.hooks import Hooks  # noqa: PLC0415

        saver = of_process(asleep=lambda: self._boundary.asleep)
        self._resident.settle_in(
            saver,
            rank=dist.get_rank(),
            pause=self._boundary.pause,
            resume=self._boundary.resume_tags,
            hooks=Hooks(before_release=self._before_release),
            vacant=getattr(saver, "vacant", nowhere),  # only a device's allocator has any
        )

    def _before_release(self) -> None:
        self._resident.require_mapped()
        self._device.require_replaceable()


def _hooking() -> Hooking:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    return Hooking(HookRegistry, HookType.AROUND, abort)


def _log(message: str) -> None:
    # One write for a whole line: the processes of an engine share their log.
    sys.stderr.write(f"[coldsnap] worker {os.getpid()}: {message}\n")
    sys.stderr.flush()
