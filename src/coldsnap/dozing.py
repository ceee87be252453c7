"""Sleep, wake and status of an engine that lives.

The one rule: convergent. What is asked for may be true already, in part or as a whole; and while anything sleeps, the
door stays closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coldsnap.artifact.durable import remove_uncommitted
from coldsnap.artifact.held import KEPT_FOR, is_kept, kept_for
from coldsnap.artifact.store import Store
from coldsnap.engines.specs import spec_of_running, was_launched_releasing
from coldsnap.errors import AdmissionError, EngineError
from coldsnap.hydrating import reading_of
from coldsnap.keeper.client import Keeper
from coldsnap.keeper.handle import Engine as Handle
from coldsnap.keeper.layout import SLEEP
from coldsnap.keeper.undo import control
from coldsnap.keeper.warm import is_warm
from coldsnap.receipts import Receipt
from coldsnap.releasing import release_request, require_seen
from coldsnap.session import Session
from coldsnap.steps import InspectEngine, SleepEngine, WakeEngine

__all__ = ["inspect", "sleep", "wake"]

Memory = Mapping[str, Mapping[str, Any]]


def sleep(session: Session, step: SleepEngine) -> Receipt:
    """Quiesce and release; a failure, or a dead caller, brings everything back and opens the door."""
    _take(session, step.run_dir)
    ranks = session.ranks
    workers, before = ranks.workers(), ranks.memory()
    if _states(before) == {"sleeping"}:
        return _done(session, step.id, "it slept already", before)
    require_seen(session, [Store(step.store).prepare()])
    session.living.undo(control("resume"))
    session.living.undo(control("hydrate"))
    drained_s = ranks.quiesce(timeout_s=step.quiesce_timeout_s)
    if step.discard:
        ranks.reset_prefix_cache()
    requests = {
        rank: release_request(session, step, worker, _private(Path(step.run_dir, "sleep", worker)))
        for rank, worker in workers.items()
    }
    ranks.release(requests, timeout_s=step.timeout_s)
    return _done(session, step.id, "asleep", ranks.memory(), {"drained_s": drained_s})


def wake(session: Session, step: WakeEngine) -> Receipt:
    """Hydrate; what cannot be brought back stays asleep, and the door closed, so that it can be tried again."""
    if is_warm(step.run_dir):
        raise AdmissionError(
            f"the engine in {step.run_dir} is warm: it has not given the captured answer yet, so it is not only woken; "
            "restore it, Restore(engine)"
        )
    _take(session, step.run_dir)
    ranks = session.ranks
    before = ranks.memory()
    if not before:
        raise EngineError(f"no rank of the engine in {step.run_dir} has memory that could sleep")
    present = {tag for reply in before.values() for tag in reply["regions"]}
    request = reading_of(step) | {"tags": [tag for tag in step.tags if tag in present]}
    replies = ranks.hydrate(dict.fromkeys(before, request), timeout_s=step.timeout_s)
    after = ranks.memory()
    if _states(after) == {"awake"}:
        ranks.reset_prefix_cache() if _states(before) != {"awake"} else None
        ranks.resume()
        _let_go(Path(step.run_dir))
    did = any(reply["mapped"] for reply in replies.values())
    seconds = {f"{name}_s": float(value) for reply in replies.values() for name, value in reply["seconds"].items()}
    told = "it was awake already" if _states(before) == {"awake"} else "awake" if did else "unchanged"
    return _done(session, step.id, told, after, seconds)


def _let_go(run_dir: Path) -> None:
    """Remove what a failed capture left to the engine: its memory has it back."""
    link = run_dir / SLEEP / KEPT_FOR
    if link.is_symlink():
        output = link.readlink()
        if is_kept(output) and kept_for(output) == run_dir:
            remove_uncommitted(output, woken=True)
        link.unlink()


def inspect(session: Session, step: InspectEngine) -> Receipt:
    """Tell how the engine is; nothing is begun, so that it can be asked while another operation runs."""
    session.serving = True
    with Keeper.connect(step.run_dir) as keeper:
        session.keeper = keeper
        try:
            status = keeper.status()
            session.report.workload = f"the engine is {status.state}, its memory unknown"
            door = session.ranks.status(timeout_s=step.timeout_s)
            known = was_launched_releasing(keeper.labels)
            memory = session.ranks.memory(timeout_s=step.timeout_s) if known else {}
        finally:
            session.keeper = None  # whatever failed, there is nothing to undo, least of all the engine
    details = {f"requests_{name}": int(value) for name, value in door.items() if name in ("unfinished", "held", "open")}
    state = "warm" if is_warm(step.run_dir) else _word(memory)
    session.report.workload = f"the engine is {status.state}, its memory {state}"
    return Receipt(
        step=step.id,
        effective=state,
        reason=f"process {status.state}" + (f", {status.operation} in flight" if status.operation else ""),
        details={"process": status.state, "memory": state, **details, **_sizes(memory), **_materialized(memory)},
    )


def _take(session: Session, run_dir: str) -> None:
    session.serving = True
    keeper = Keeper.connect(run_dir)
    try:
        keeper.begin(session.plan.operation, [])
    except BaseException:  # another's operation is in flight: there is nothing of ours to undo
        keeper.close()
        raise
    session.take(keeper)
    session.engine = spec_of_running(keeper.labels, run_dir=run_dir)


def _done(
    session: Session, step: str, effective: str, memory: Memory, details: Mapping[str, float] | None = None
) -> Receipt:
    keeper = session.living
    keeper.end()
    session.keeper = None
    session.report.engine = Handle(keeper)
    session.report.workload = f"the engine's memory is {_word(memory)}"
    return Receipt(
        step=step, effective=effective, details={**(details or {}), "memory": _word(memory), **_sizes(memory)}
    )


def _private(directory: Path) -> Path:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def _states(memory: Memory) -> set[str]:
    return {str(reply["state"]) for reply in memory.values()}


def _word(memory: Memory) -> str:
    """Return how the memory of all workers is, in one word."""
    states = _states(memory)
    return "failed" if "failed" in states else "sleeping" if "sleeping" in states else "awake"


def _materialized(memory: Memory) -> dict[str, float | int | str]:
    """Return how packs are doing that somebody asked for: the worst state of all workers."""
    # A rank keeps the code of its capture, which need not know of it.
    known = [reply["materialization"] for reply in memory.values() if "materialization" in reply]
    if not known or all(one["state"] == "none" for one in known):
        return {}
    order = ("failed", "none", "scheduled", "writing", "verifying", "ready")
    return {
        "materialization": min((str(one["state"]) for one in known), key=order.index),
        "materialization_bytes": sum(int(one["bytes"]) for one in known),
        "materialization_error": "; ".join(str(one["error"]) for one in known if one["error"]),
    }


def _sizes(memory: Memory) -> dict[str, float | int | str]:
    sizes: dict[str, float | int | str] = {}
    for reply in memory.values():
        for tag, region in reply["regions"].items():
            for name in ("bytes", "mapped_bytes"):
                key = f"{tag}_{name}"
                sizes[key] = int(sizes.get(key, 0)) + int(region[name])
    return sizes
