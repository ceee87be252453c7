"""What the plugin puts into the front end and into each scheduler.

The one rule: a process gets the hooks of its own role alone, since SGLang imports the module of every target.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from coldsnap.engines.rank import Operation
from coldsnap.engines.sglang.doors import TRANSITION_S, Doors
from coldsnap.engines.sglang.frontend import FrontEnd
from coldsnap.engines.sglang.hooking import Hooking
from coldsnap.engines.sglang.plugin import abort
from coldsnap.engines.sglang.warmup import Warmup
from coldsnap.keeper.control import request_control
from coldsnap.keeper.directive import read_directive

__all__ = ["hook_front_end", "hook_worker"]


def hook_front_end(directive_path: str) -> Mapping[str, Operation]:
    """Check SGLang's sources, hook the front end, and return what it answers.

    Raises:
        ContractError: SGLang lacks what the plugin relies on.
    """
    import sglang  # noqa: PLC0415

    from coldsnap.engines.sglang import contract, load_format  # noqa: PLC0415

    (tree,) = sglang.__path__
    contract.report(tree, version=getattr(sglang, "__version__", "")).require()
    started = read_directive(directive_path).operation == "restore"  # out of a template: others come back running
    front = FrontEnd(closed=started)
    doors = Doors(front, os.path.dirname(directive_path))
    load_format.announce()
    _hooking().register((*doors.hooks(), *load_format.hooks(), *(Warmup(front).hooks() if started else ())))
    return {**front.operations(), **doors.meeting.operations()}


def hook_worker(directive_path: str) -> Mapping[str, Operation]:
    """Hook the scheduler of this process, and return what its rank answers.

    Raises:
        ContractError: SGLang lacks what the plugin hooks.
    """
    from coldsnap.engines.ordered import ordered  # noqa: PLC0415
    from coldsnap.engines.sglang import load_format  # noqa: PLC0415
    from coldsnap.engines.sglang.agreement import over_group  # noqa: PLC0415
    from coldsnap.engines.sglang.arrivals import Arrivals  # noqa: PLC0415
    from coldsnap.engines.sglang.boundary import Boundary  # noqa: PLC0415
    from coldsnap.engines.sglang.live import Live  # noqa: PLC0415
    from coldsnap.engines.sglang.loading import is_asked_for, loads  # noqa: PLC0415
    from coldsnap.engines.sglang.scheduler import Scheduler  # noqa: PLC0415
    from coldsnap.engines.sglang.updating import Updates  # noqa: PLC0415
    from coldsnap.engines.sglang.worker import Resident  # noqa: PLC0415

    directory = os.path.dirname(directive_path)

    def meet(kind: str, worker: str) -> None:
        request_control(directory, "meet", roles=["api"], timeout_s=TRANSITION_S, kind=kind, worker=worker)

    resident = Resident(meet=meet, settle=loads.settle)
    scheduler = Scheduler(resident)
    boundary = Boundary(
        resident,
        Live(resident, scheduler.identity),
        exchange=lambda manager: over_group(manager.tp_cpu_group),
        before=scheduler.discard_graphs,
        leave=scheduler.end_communicators,
        enter=scheduler.begin_communicators,
        after=scheduler.capture_graphs,
        abort=abort,
    )
    arrivals = Arrivals(resident, boundary, scheduler)
    observing = loads.hooks() if is_asked_for() or ordered.exports() else ()
    _hooking().register((*arrivals.hooks(), *Updates(resident).hooks(), *observing, *load_format.hooks()))
    about_models = {**loads.operations(), **ordered.operations(), "digests": arrivals.digests}
    about_models["identity"] = scheduler.identify
    return {**resident.operations(), **about_models}


def _hooking() -> Hooking:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    return Hooking(HookRegistry, HookType.AROUND, abort)
