"""The steps that turn a dump into an artifact, and the descriptor: what the capture found out, in the format's words.

The one rule: nothing is found out here; whatever is written was seen by a step of this capture.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from coldsnap import artifact as format9
from coldsnap.describe import compatibility_unit, described_engine, described_model
from coldsnap.drivers import n580, n610, sequence
from coldsnap.engines.specs import COMMAND, EngineRecord, spec_to_text
from coldsnap.host.contracts import CONTRACTS
from coldsnap.host.facts import HostFacts
from coldsnap.host.secrets import secret_names
from coldsnap.outside import LookedFor, require_outside
from coldsnap.receipts import Receipt
from coldsnap.releasing import WEIGHTS, describe_weights, store_of
from coldsnap.session import Session
from coldsnap.shrinking import searchable, stored_pages
from coldsnap.steps import CommitArtifact, LaunchTemplate, SealArtifact

__all__ = ["CAPSULE", "commit", "descriptor", "seal"]

UNIT = "unit-0"
CAPSULE = f"capsule/{UNIT}"


def seal(session: Session, step: SealArtifact) -> Receipt:
    """Write how the engine was described beside the images, and digest everything."""
    writer = session.need(session.writer, "an output")
    record = EngineRecord(
        spec=spec_to_text(session.spec), environment=session.need(session.environment, "an environment")
    )
    path = writer.directory(CAPSULE) / "engine.json"
    path.write_text(record.to_text())
    session.sealed = files = writer.seal(CAPSULE)
    looked_for = LookedFor()
    if session.released:
        store = store_of(session)
        looked_for = require_outside(session, store, [writer.path / file.path for file in searchable(files)])
        weights = writer.seal(WEIGHTS)
        session.weights = describe_weights(session, {file.path: file for file in weights}, store)
        files += weights
    return Receipt(
        step=step.id,
        effective=f"{len(files)} files",
        reason=str(looked_for) if looked_for.samples else "",
        bytes=sum(file.bytes for file in files),
        details={"samples": looked_for.samples, "traces": looked_for.traces},
    )


def commit(session: Session, step: CommitArtifact) -> Receipt:
    """Make the artifact exist."""
    writer = session.need(session.writer, "an output")
    session.artifact = writer.commit(descriptor(session))
    session.report.artifact = session.artifact.path
    return Receipt(
        step=step.id, effective=session.artifact.digest[:19], bytes=sum(session.artifact.size_bytes.values())
    )


def descriptor(session: Session) -> format9.Descriptor:
    """Say everything that a restore must know, from what the steps of the capture have found out."""
    plan, engine = session.plan, session.spec
    keeper = session.living
    host = session.need(session.host, "the host's facts")
    dumped = session.need(session.dumped, "a process image")
    question, answer = session.need(session.question, "a question"), session.need(session.answer, "an answer")
    command = json.loads(keeper.labels[COMMAND])
    devices = _devices(host, command["environment"], engine.world_size)
    now = time.time_ns()
    requires = format9.Requires(features=tuple(sorted(CONTRACTS[plan.driver].features)) if host.gpus else ())
    return format9.Descriptor(
        capture_id=session.name_capture(),
        created_unix_ns=now,
        plan_digest=plan.digest,
        snapshot_driver=_snapshot_driver(plan.driver, gpu=bool(host.gpus)),
        requires=requires,
        engine=described_engine(
            engine,
            session.need(session.environment, "an environment"),
            described_model(session.need(session.model, "a model")),
            argv=command["argv"],
            environ=command["environment"],
            redacted=secret_names(command["environment"]),
            cwd=command["cwd"],
        ),
        compatibility=format9.Compatibility(
            policy="target-local-v1" if _imported(session) else "placement-independent-v1",
            units=(compatibility_unit(UNIT, host, devices, plan.driver),),
        ),
        topology=format9.Topology(
            units=(
                format9.TopologyUnit(unit=UNIT, workers=tuple(f"worker-{rank}" for rank in range(engine.world_size))),
            ),
            tensor_parallel_size=engine.tensor_parallel_size,
            pipeline_parallel_size=engine.pipeline_parallel_size,
        ),
        capsule=format9.Capsule(units=(_capsule(session, dumped),)),
        graph=_graph(session),
        weights=session.weights or format9.Weights(kind="image" if plan.driver == "n610" else "checkpoint"),
        cache_seeds=session.seeds,
        acceptance=format9.Acceptance(
            prompt=question.prompt, max_tokens=question.max_tokens, text=answer.text, token_ids=answer.token_ids
        ),
    )


def _snapshot_driver(driver: str, *, gpu: bool) -> format9.SnapshotDriver:
    if driver == "n580":
        return format9.SnapshotDriver(id="n580", abi=n580.ABI, boundary="pre-cuda-process-template")
    return format9.SnapshotDriver(
        id="n610",
        abi=sequence.ABI,
        boundary="initialized-cuda-process-state" if gpu else "initialized-process-state",
    )


def _imported(session: Session) -> bool:
    return any(isinstance(step, LaunchTemplate) and step.stop == "imported" for step in session.plan)


def _devices(host: HostFacts, environment: Mapping[str, str], workers: int) -> tuple[int, ...]:
    """Return the GPUs that the engine was given: those it was launched with, else the first ones."""
    named = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    known = {str(gpu.index): gpu.index for gpu in host.gpus} | {gpu.uuid: gpu.index for gpu in host.gpus}
    chosen = [known[name] for name in named if name in known] or [gpu.index for gpu in host.gpus]
    return tuple(chosen[:workers])


def _capsule(session: Session, dumped: n610.DumpedTree) -> format9.CapsuleUnit:
    keeper, host, port = session.living, session.need(session.host, "the host's facts"), session.endpoint.port
    return format9.CapsuleUnit(
        unit=UNIT,
        path=CAPSULE,
        images=f"{CAPSULE}/images",
        criu=format9.Criu(
            version=".".join(map(str, dumped.criu_version)),
            sha256="" if host.criu is None else host.criu.build_digest,
            options=format9.CriuOptions(link_remap=True, tcp_established=True, file_locks=True),
        ),
        root_pid=dumped.root_pid,
        pids=dumped.pids,
        listeners=tuple(
            format9.Listener(address=each.address, port=each.port, role="api" if each.port == port else "internal")
            for each in dumped.listeners
        ),
        namespace="private" if keeper.private else "host",
        run_dir=keeper.tree_dir,
        pages=stored_pages(session.shrunk),
        files=session.sealed,
    )


def _graph(session: Session) -> format9.Graph:
    decision = session.plan.decision("graphs.policy")
    return format9.Graph(
        policy_requested=decision.requested,
        policy_effective=decision.effective,
        decision=_GRAPHS.get(decision.effective, "no_graphs"),
    )


_GRAPHS = {"kept": "single_worker_graphs_retained", "recreate-from-plan": "recreated_from_engine_plan"}
