"""The steps of a capture that deal with the engine: admit the output, attach, ask, quiesce, dump, settle."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from coldsnap.accelerating import prepare
from coldsnap.artifact import ArtifactWriter
from coldsnap.artifact.durable import COMMITTED
from coldsnap.artifact.held import KEPT_FOR
from coldsnap.artifact.store import Store
from coldsnap.drivers import n610
from coldsnap.engines.acceptance import Question, compare
from coldsnap.engines.endpoint import log_tail
from coldsnap.engines.settings import inherited_environment
from coldsnap.engines.specs import COMMAND, EngineRecord, spec_from_text, was_launched_releasing
from coldsnap.engines.tidying import tidied
from coldsnap.errors import AcceptanceError, AdmissionError, EngineError, UnsupportedError
from coldsnap.host.secrets import secret_names
from coldsnap.keeper.client import Keeper
from coldsnap.keeper.handle import Engine as Handle
from coldsnap.keeper.rundir import run_dir_for
from coldsnap.keeper.undo import CONTINUE, control, remove
from coldsnap.launching import ENVIRONMENT
from coldsnap.plan import Plan
from coldsnap.receipts import Receipt
from coldsnap.releasing import require_seen
from coldsnap.sealing import CAPSULE
from coldsnap.session import Session
from coldsnap.steps import (
    AdmitHost,
    AdmitOutput,
    AttachEngine,
    DumpTree,
    LaunchEngine,
    Quiesce,
    RecordAnswer,
    ReleaseWeights,
    ResumeEngine,
    SettleWorkload,
)

__all__ = [
    "admit_output",
    "attach",
    "dump",
    "quiesce",
    "record_answer",
    "resume",
    "settle",
]

IDLE_POLL_S = 0.02
TIDY_S = 60.0
"""A collection of garbage takes about a second for a gigabyte of Python objects, and cannot be interrupted."""

MAX_NOTES = 20
"""How many findings of an audit are kept in a receipt."""


def admit_output(session: Session, step: AdmitOutput) -> Receipt:
    """Take the output, so that nobody else can; it is given back unless the artifact is committed.

    And a store that could not be written to is refused now, when nothing has been started or brought to rest.
    """
    _require_outside(step.output, session.plan)
    for store in _stores(session.plan):
        store.prepare()
    session.writer = session.stack.enter_context(ArtifactWriter.create(step.output, lanes=session.library))
    return Receipt(step=step.id, effective="free")


def _stores(plan: Plan) -> tuple[Store, ...]:
    """Return the stores that get packs."""
    return tuple(Store(step.store) for step in plan if isinstance(step, ReleaseWeights))


def _require_outside(output: str, plan: Plan) -> None:
    """Refuse an output in the engine's run directory, which goes when the engine does."""
    for step in plan:
        named = step.name if isinstance(step, LaunchEngine) and step.name else ""
        run_dir = step.run_dir if isinstance(step, LaunchEngine | AttachEngine) else ""
        place = run_dir or (str(run_dir_for(named)) if named else "")
        if place and Path(os.path.realpath(output)).is_relative_to(os.path.realpath(place)):
            raise AdmissionError(
                f"the output {output} lies in the run directory of its engine, {place}, which is removed when the "
                "engine ends; choose another output"
            )


def attach(session: Session, step: AttachEngine) -> Receipt:
    """Take up an engine that serves: from here on a dead caller leaves it serving."""
    session.serving = True
    keeper = Keeper.connect(step.run_dir)
    try:
        keeper.begin(session.plan.operation, [])
    except BaseException:  # another's operation is in flight, or the engine has ended: there is nothing of ours to undo
        keeper.close()
        raise
    session.take(keeper)
    if session.writer is not None:
        keeper.undo(remove(session.writer.path, unless=COMMITTED, kept=KEPT_FOR))
    mismatches = [*_not_as_planned(session, keeper), *_asleep(session)]
    if mismatches:
        raise AdmissionError(f"the engine in {step.run_dir} cannot be captured under this policy", mismatches)
    record = EngineRecord.from_text(keeper.labels[ENVIRONMENT], path=f"{step.run_dir}/keeper.json")
    session.engine = engine = spec_from_text(record.spec)
    session.environment = record.environment
    if session.gpu and engine.world_size > 1 and engine.eager() != engine:
        raise UnsupportedError(
            f"CUDA graphs of {engine.world_size} workers",
            field="graphs.policy",
            works="capturing an engine that this library launches, or one launched with --enforce-eager",
        )
    session.model = session.engine.identify(inherited_environment())
    if session.writer is not None and (stores := _stores(session.plan)):
        require_seen(session, [*(store.directory for store in stores), session.writer.path])
    said = _examined(session)
    return Receipt(step=step.id, effective=f"{session.engine.kind} {session.engine.model}", details=said)


def _examined(session: Session) -> Mapping[str, str]:
    """Refuse a tree that cannot be dumped while it still serves; return what else was found.

    Clients may be connected: they are looked for again when the engine is quiet.
    """
    refuses = session.plan.decision("process.secrets").effective == "refuse"
    audit = n610.prepare_dump(session.living, secrets="blocks" if refuses else "note", patient=True)
    return {f"{found.severity} {number}": str(found) for number, found in enumerate(audit.notes[:MAX_NOTES], 1)}


def _not_as_planned(session: Session, keeper: Keeper) -> Iterator[str]:
    """Yield what the policy demands and a running engine was launched without."""
    admitted = session.plan["admit-host"]
    namespace = "private" if keeper.private else "host"
    if isinstance(admitted, AdmitHost) and admitted.namespace != namespace:
        yield f'it runs in {namespace} namespaces; set process.namespace = "{namespace}"'
    secrets = secret_names(json.loads(keeper.labels[COMMAND])["environment"])
    if secrets and session.plan.decision("process.secrets").effective == "refuse":
        yield (
            f"its environment has names that look secret ({', '.join(secrets)}), and a process image would hold their "
            'values; launch it without them, or set process.secrets = "allow"'
        )


def _asleep(session: Session) -> Iterator[str]:
    """Yield what sleeps: it cannot answer, so it cannot be captured, and whether it may wake is not ours to say."""
    # A rank keeps the code of its capture: one that was not launched for it need not know the question.
    known = was_launched_releasing(session.living.labels)
    for rank, memory in session.ranks.memory().items() if known else ():
        if memory["state"] != "awake":
            yield f"the memory of {rank} is {memory['state']}; wake the engine first (Wake)"


def record_answer(session: Session, step: RecordAnswer) -> Receipt:
    """Ask twice: an answer that varies would make every restore look wrong."""
    session.question = question = Question(prompt=step.prompt, max_tokens=step.tokens)
    answers = []
    for _ in range(2):
        _empty_prefix_cache(session, step.timeout_s)
        answers.append(session.spec.ask(session.endpoint, question, timeout_s=120.0, watch=session.watch))
    try:
        compare(*answers)
    except AcceptanceError as error:
        raise EngineError(
            f"the engine gives two answers to one greedy request, so no restore could be checked: {error}",
            log_tail=log_tail(session.living.log_path),
        ) from error
    session.answer = answers[1]
    return Receipt(
        step=step.id,
        effective=f"{len(answers[1].token_ids)} tokens",
        reason=repr(answers[1].text[:40]),
        details={"first_token_s": answers[0].first_token_s, "answer_s": answers[0].seconds},
    )


def _empty_prefix_cache(session: Session, timeout_s: float) -> None:
    """Wait for a moment without requests: those in flight hold blocks of the cache."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            session.ranks.reset_prefix_cache()
        except EngineError:
            if session.ended() or time.monotonic() > deadline:
                raise
            time.sleep(IDLE_POLL_S)
        else:
            return


def quiesce(session: Session, step: Quiesce) -> Receipt:
    """Stop taking work; should anything fail from here on, the first thing undone is this."""
    # A template was looked at before its dump; what became of it is not dumped.
    said = {} if session.plan.driver == "n580" else _examined(session)
    prepare(session)
    session.living.undo(control("resume"))
    seconds = session.ranks.quiesce(timeout_s=step.timeout_s)
    freed = _tidied(session)
    return Receipt(step=step.id, effective="idle", details={"drained_s": seconds, **freed, **said})


def _tidied(session: Session) -> Mapping[str, float | int | str]:
    """Have every rank give back what nothing uses, so that no restore has to bring it back."""
    began = time.monotonic()
    replies = session.ranks.tidy(timeout_s=TIDY_S)
    return {"tidied_s": time.monotonic() - began, **tidied(replies)}


def resume(session: Session, step: ResumeEngine) -> Receipt:
    """Let a kept workload serve on before its artifact is sealed."""
    session.ranks.resume()
    return Receipt(step=step.id, effective="serves")


def dump(session: Session, step: DumpTree) -> Receipt:
    """Freeze and dump; the tree then runs on, or stands still until the artifact is committed."""
    writer = session.need(session.writer, "an output")
    keeper = session.living
    if step.leave == "stopped":
        keeper.undo(CONTINUE)
    cuda = session.cuda
    pids, devices = ((), ()) if cuda is None else (cuda.pids, cuda.held)
    session.dumped = dumped = n610.dump_tree(
        keeper,
        step.criu,
        writer.directory(CAPSULE),
        leave=step.leave,
        timeout_s=step.timeout_s,
        nvidia_pids=pids,
        devices=devices,
    )
    return Receipt(
        step=step.id,
        effective=f"{len(dumped.pids)} processes, left {step.leave}",
        bytes=dumped.image_bytes + dumped.volatile_bytes,
        details=dumped.details,
    )


def settle(session: Session, step: SettleWorkload) -> Receipt:
    """End the operation: the workload is stopped, or is the caller's again."""
    keeper = session.living
    if step.then == "keep":
        keeper.end()
        session.keeper = None
        session.report.engine = Handle(keeper)
        loss = keeper.status().loss
        lost = f"the engine does not serve any more ({loss}); the artifact is whole: stop the engine and restore it"
        session.report.workload = lost if loss else "the engine serves on"
        return Receipt(step=step.id, effective="serves no more" if loss else "serves on", reason=loss)
    keeper.stop(grace_s=0)  # ends the operation too: between the two a dead caller would leave it standing still
    session.keeper = None
    if not keeper.private:
        n610.remove_leftovers(session.need(session.dumped, "a process image").volatile)
    if session.cuda is not None:
        session.cuda.close()  # the processes it checkpointed are dead; it has nothing to bring back
        session.cuda = None
    session.report.workload = "the engine was stopped after the commit"
    return Receipt(step=step.id, effective="stopped")
