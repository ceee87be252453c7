"""The steps of a restore: admit, stage, thaw, reconnect, compare.

The one rule: verification runs beside the thaw, and no answer is accepted before it has ended.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from coldsnap.accelerating import prepare
from coldsnap.artifact import Artifact, Target
from coldsnap.artifact.evidence import hash_file
from coldsnap.artifact.held import reading
from coldsnap.artifact.private import open_private, read_small
from coldsnap.describe import target_engine
from coldsnap.drivers import n610
from coldsnap.engines.acceptance import Answer, Question, compare
from coldsnap.engines.environment import environment_still_is
from coldsnap.engines.specs import COMMAND, SPEC, EngineRecord, spec_from_text, spec_to_text
from coldsnap.errors import AdmissionError, CompatibilityError, IntegrityError
from coldsnap.hydrating import require_awake
from coldsnap.keeper.client import Interpreter, Keeper
from coldsnap.keeper.directive import Directive, Endpoint, read_directive, write_directive
from coldsnap.keeper.rundir import new_name, run_dir_for
from coldsnap.keeper.undo import KILL
from coldsnap.launching import ENVIRONMENT
from coldsnap.policy import Compatibility
from coldsnap.receipts import Receipt
from coldsnap.session import Session
from coldsnap.shrinking import feed_of
from coldsnap.starting import require_same_files
from coldsnap.steps import (
    AdmitArtifact,
    CompareAnswer,
    LeaveWarm,
    Reconnect,
    StageCapsule,
    StartKeeper,
    ThawTree,
    VerifyFiles,
)

SMALL_BYTES = 1 << 20
"""Up to this size a file is hashed before the start: a millisecond."""

__all__ = ["admit_artifact", "compare_answer", "reconnect", "stage", "start_ahead", "start_keeper", "thaw", "verify"]


def admit_artifact(session: Session, step: AdmitArtifact) -> Receipt:
    """Open the artifact that was planned for, and compare the engine's environment without starting anything."""
    session.stack.enter_context(reading(Path(step.artifact)))  # until the end, nobody deletes it
    opened = Artifact.open(step.artifact)
    if opened.digest != step.digest:
        raise AdmissionError(
            f"{step.artifact} is not the artifact of the plan: expected {step.digest}, found {opened.digest}; "
            "resolve again"
        )
    _require_whole(opened)
    (capsule,) = opened.descriptor.capsule.units
    path = opened.path / capsule.path / "engine.json"
    record = EngineRecord.from_text(read_small(path, max_bytes=SMALL_BYTES).decode(), path=str(path))
    engine = spec_from_text(record.spec)
    changed = environment_still_is(record.environment)
    userspace = opened.descriptor.compatibility.units[0].cuda_userspace
    target = Target(units=(), engine=target_engine(engine, record.environment, cuda_userspace=userspace))
    differs = [text for text in opened.check_compatibility(target, Compatibility()) if not text.startswith("unit ")]
    if changed or differs:
        raise CompatibilityError(f"the engine of {step.artifact} is not what was captured", [*differs, *changed])
    if opened.descriptor.snapshot_driver.id == "n580":
        require_same_files(opened, record.environment)
    session.artifact, session.engine, session.environment = opened, engine, record.environment
    session.report.artifact = opened.path
    return Receipt(
        step=step.id, effective=f"{engine.kind} {opened.descriptor.engine.version}, {opened.descriptor.capture_id}"
    )


def _require_whole(opened: Artifact) -> None:
    """Refuse what is cut short, or small and changed, before anything starts; the rest is compared beside the thaw."""
    for file in opened.descriptor.files:
        path = opened.path / file.path
        found = f"{path.stat().st_size} bytes" if path.exists() else "nothing"
        if found != f"{file.bytes} bytes":
            raise IntegrityError("the file is not whole", path=str(path), expected=f"{file.bytes} bytes", actual=found)
        if file.bytes <= SMALL_BYTES:  # what these say decides what is started, and which error a change would give
            with open_private(path) as (fd, status):
                found = hash_file(fd, status, str(path))
            if found != file.sha256:
                raise IntegrityError(
                    "wrong content (rule evidence.5)", path=str(path), expected=file.sha256, actual=found
                )


def start_ahead(session: Session) -> None:
    """Start the keeper's interpreter, if there will be one, beside the admission; a refusal ends it."""
    if any(isinstance(step, StartKeeper) for step in session.plan):
        session.interpreter = Interpreter(sys.executable)
        session.stack.callback(session.interpreter.close)


def start_keeper(session: Session, step: StartKeeper) -> Receipt:
    """Start the keeper; until the hand-over a dead caller takes everything with it."""
    opened = session.need(session.artifact, "an artifact")
    captured = opened.descriptor.engine
    (capsule,) = opened.descriptor.capsule.units
    environment = session.need(session.environment, "an environment")
    record = EngineRecord(spec=spec_to_text(session.spec), environment=environment)
    labels = {
        "engine": captured.kind,
        "artifact": str(opened.path),
        SPEC: record.spec,
        ENVIRONMENT: record.to_text(),
        COMMAND: json.dumps({"argv": captured.argv, "environment": dict(captured.environment), "cwd": captured.cwd}),
    }
    run_dir = step.run_dir or str(run_dir_for(step.name or new_name(captured.kind)))
    if step.namespace == "host":
        run_dir = str(Path(capsule.run_dir).parent)
    if Path(os.path.realpath(run_dir)).is_relative_to(os.path.realpath(opened.path)):
        raise AdmissionError(f"the run directory {run_dir} lies in the artifact {opened.path}; choose another one")
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="coldsnap-beside") as beside:
        # What the stage needs first is loaded while the keeper's interpreter starts.
        loaded = beside.submit(n610.load_messages)
        started = Keeper.start(run_dir, namespace=step.namespace, labels=labels, interpreter=session.interpreter)
        keeper = session.take(started)
        loaded.result()
    keeper.begin("restore", [KILL])
    prepare(session)
    return Receipt(step=step.id, effective=f"{step.namespace} namespaces", reason=f"run directory {run_dir}")


def verify(session: Session, step: VerifyFiles) -> Receipt:
    """Compare every file with its evidence, or by digest; runs beside the thaw, and no answer is accepted before."""
    admission = Artifact.open(step.artifact).verify(step.mode, lanes=session.library)
    by_stat = sum(file.reason == "unchanged" for file in admission.files)
    return Receipt(
        step=step.id,
        requested=step.mode,
        effective=f"{by_stat} of {len(admission.files)} files unchanged by stat",
        reason=f"{admission.bytes_hashed / 1e6:,.1f} MB digested",
        bytes=admission.bytes_hashed,
    )


def stage(session: Session, step: StageCapsule) -> Receipt:
    """Write the directive, put the volatile files back, move ports that are taken."""
    opened = session.need(session.artifact, "an artifact")
    keeper = session.living
    (capsule,) = opened.descriptor.capsule.units
    endpoint = Endpoint(host=step.address, port=step.port)
    abi = opened.descriptor.engine.plugin_abi
    write_directive(
        keeper.rank_dir,
        Directive.new(operation="restore", endpoint=endpoint, plugin_abi=abi, provider=session.provider),
    )
    captured = next((listener for listener in capsule.listeners if listener.role == "api"), None)  # of no template
    rebind = None
    if captured is not None:
        rebind = n610.Rebind(port=captured.port, to_port=step.port, to_address=step.address)
    session.staged = staged = n610.stage_tree(
        keeper, opened.path / capsule.path, rebind=rebind, feed=feed_of(session, step)
    )
    session.stack.callback(staged.release)
    moved = staged.ports.moved
    return Receipt(
        step=step.id,
        requested=f"{step.address}:{step.port}",
        effective=f"{len(moved)} port{'s' * (len(moved) > 1)} moved" if moved else "ports as captured",
        reason=", ".join(f"{old} to {new}" for old, new in list(moved.items())[:4]),
        bytes=staged.volatile.data_bytes,
    )


def thaw(session: Session, step: ThawTree) -> Receipt:
    """Bring the process tree back."""
    staged = session.need(session.staged, "a staged capsule")
    session.thawed = thawed = n610.thaw_tree(session.living, step.criu, staged, timeout_s=step.timeout_s)
    return Receipt(
        step=step.id,
        effective=f"root pid {thawed.root_pid}",
        bytes=thawed.image_bytes,
        details=thawed.details,
    )


def reconnect(session: Session, step: Reconnect) -> Receipt:
    """Give every rank its new incarnation; the front end then takes the acceptance request, and nobody else's yet."""
    directive = read_directive(Path(session.living.rank_dir) / "directive.json")
    session.ranks.require(session.spec.roles(gpu=session.gpu, environment=session.environment))
    adopted = session.ranks.adopt(
        incarnation=directive.incarnation, reseed=not session.spec.user_seeded, timeout_s=step.timeout_s
    )
    if not any(isinstance(one, LeaveWarm) for one in session.plan):
        session.ranks.admit(session.key, timeout_s=step.timeout_s)
    return Receipt(step=step.id, effective=f"{len(adopted)} ranks", reason=f"incarnation {directive.incarnation[:8]}")


def compare_answer(session: Session, step: CompareAnswer) -> Receipt:
    """Ask what was asked at capture; the engine is ready when it answers the same."""
    opened = session.need(session.artifact, "an artifact")
    captured = opened.descriptor.acceptance
    if session.provider != "image":
        require_awake(session)
    session.ranks.reset_prefix_cache()
    asked_ns = session.report.timeline.now_ns()
    question = Question(prompt=captured.prompt, max_tokens=captured.max_tokens)
    answer = session.spec.ask(
        session.endpoint, question, timeout_s=step.timeout_s, request_id=session.key, watch=session.watch
    )
    compare(Answer(token_ids=captured.token_ids, text=captured.text), answer)
    session.report.answer_s = asked_ns / 1e9 + answer.first_token_s
    return Receipt(
        step=step.id,
        effective=f"{len(answer.token_ids)} tokens as captured",
        details={"first_token_s": answer.first_token_s, "answer_s": answer.seconds},
    )
