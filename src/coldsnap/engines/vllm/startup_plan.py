"""vLLM's startup plan, taken with a little less memory than it was made with.

vLLM writes down how large a KV cache its profiling found, and takes that the next time, where its own fingerprint of
model, configuration, device and libraries is the same and at least as much memory is free as then. A device never has
the same to the byte: a few megabytes that somebody else took would cost a whole profile.

The one rule: what is missing is taken off the KV cache, all of it; and where more is missing than was allowed, or than
the cache has, vLLM profiles as if there were no plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Literal

from attrs import asdict, frozen

from coldsnap.engines.rank import Operation
from coldsnap.engines.settings import setting
from coldsnap.errors import ContractError

__all__ = ["STARTUP_PLAN", "Outcome", "StartupPlan", "admitted"]

STARTUP_PLAN = "vllm.v1.worker.startup_plan"
_NEEDED = ("maybe_apply_startup_plan", "_applicable_kv_cache_memory_bytes")

Log = Callable[[str], None]


@frozen(kw_only=True)
class Outcome:
    """What became of a plan.

    Attributes:
        state: ``none`` (no plan of this fingerprint, or vLLM was not asked to look), ``applied`` (as it was recorded),
            ``shrunk`` (the KV cache by what is missing), ``profiled`` (too much is missing).
        recorded_free_bytes: What was free when the plan was made.
        free_bytes: What is free.
        shortfall_bytes: What is missing; 0 when nothing is.
        kv_cache_bytes: What the KV cache gets; 0 where vLLM finds out by profiling.
    """

    state: Literal["none", "applied", "shrunk", "profiled"] = "none"
    recorded_free_bytes: int = 0
    free_bytes: int = 0
    shortfall_bytes: int = 0
    kv_cache_bytes: int = 0


def admitted(plan: Mapping[str, Any], free_bytes: int, *, most_bytes: int) -> Outcome:
    """Say what becomes of a plan.

    Args:
        plan: As vLLM has read it; its fingerprint is the one of this start.
        free_bytes: What is free now.
        most_bytes: How much may be missing.
    """
    kv_bytes, recorded = plan.get("kv_cache_memory_bytes"), plan.get("free_memory_baseline")
    if type(kv_bytes) is not int or type(recorded) is not int or kv_bytes <= 0:
        return Outcome()
    shortfall = max(0, recorded - free_bytes)
    left = kv_bytes - shortfall
    state: Literal["applied", "shrunk", "profiled"] = "applied" if not shortfall else "shrunk"
    if shortfall > most_bytes or left <= 0:
        state, left = "profiled", 0
    return Outcome(
        state=state,
        recorded_free_bytes=recorded,
        free_bytes=free_bytes,
        shortfall_bytes=shortfall,
        kv_cache_bytes=left,
    )


class StartupPlan:
    """The plan of this process's worker.

    Attributes:
        outcome: What became of it.
    """

    def __init__(self) -> None:
        self.outcome = Outcome()
        self._alone = False

    def operations(self) -> Mapping[str, Operation]:
        """Return what a rank answers about the start of its worker."""
        return {"startup": lambda _: asdict(self.outcome)}

    def watch(self, module: ModuleType, *, log: Log, environ: Mapping[str, str] | None = None) -> None:
        """Put the rule in the place of vLLM's.

        Args:
            module: ``vllm.v1.worker.startup_plan``.
            log: Takes one sentence.
            environ: Defaults to the process's own environment.

        Raises:
            ContractError: This vLLM applies plans in another way.
        """
        missing = [name for name in _NEEDED if not callable(getattr(module, name, None))]
        if missing:
            raise ContractError(f"{STARTUP_PLAN} has no {', '.join(missing)}: this vLLM applies its plans another way")
        most_bytes = int(setting("COLDSNAP_STARTUP_PLAN_MAX_SHORTFALL_BYTES", environ))
        apply = module.maybe_apply_startup_plan

        @functools.wraps(apply)
        def applying(worker: Any) -> None:
            self.outcome = Outcome()
            self._alone = int(worker.parallel_config.world_size) == 1
            apply(worker)

        def judging(plan: dict[str, Any], current_free_memory: int) -> int | None:
            # Ranks that judge differently would profile and not profile beside one another, and wait for ever.
            self.outcome = admitted(plan, int(current_free_memory), most_bytes=most_bytes if self._alone else 0)
            log(_sentence(self.outcome))
            return self.outcome.kv_cache_bytes or None

        module.maybe_apply_startup_plan = applying  # type: ignore[attr-defined]
        module._applicable_kv_cache_memory_bytes = judging  # type: ignore[attr-defined]  # noqa: SLF001


def _sentence(outcome: Outcome) -> str:
    if outcome.state == "applied":
        return f"the startup plan is taken as it was recorded: a KV cache of {outcome.kv_cache_bytes:,} bytes"
    if outcome.state == "shrunk":
        return (
            f"the startup plan is taken with {outcome.shortfall_bytes:,} bytes less free than recorded: "
            f"the KV cache gets {outcome.kv_cache_bytes:,}"
        )
    if outcome.state == "profiled":
        return f"the startup plan is not taken: {outcome.shortfall_bytes:,} bytes less are free than recorded"
    return "the startup plan says nothing that could be taken"


startup_plan = StartupPlan()
"""The one of this process: vLLM has one worker in each."""
