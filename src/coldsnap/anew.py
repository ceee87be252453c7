"""Engines that are started anew from packs: the files they start with, the orders of their loads, what these did.

The one rule: between the capture and a restore an engine's command does not change; where its model lies and what its
load reads or writes is said beside the directive and in it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from coldsnap.artifact.durable import write_file_durably
from coldsnap.artifact.manifest import ModelSource
from coldsnap.artifact.payloads import WorkerWeights
from coldsnap.artifact.store import Store
from coldsnap.artifact.tree import Trees
from coldsnap.describe import described_model
from coldsnap.engines.base import StartsFromPacks
from coldsnap.engines.environment import own_code_digest
from coldsnap.engines.environment_probe import code_digest
from coldsnap.engines.settings import inherited_environment
from coldsnap.errors import EngineError
from coldsnap.hydrating import checkpoint_figures, payloads_of, reading_of
from coldsnap.keeper import layout
from coldsnap.keeper.activation import ACTIVATION, MODEL, activation_files, place
from coldsnap.keeper.control import request_control
from coldsnap.keeper.directive import (
    Checkpoint,
    Export,
    Hydration,
    Loader,
    WorkerSource,
    read_directive,
    write_directive,
)
from coldsnap.receipts import Receipt
from coldsnap.recovering import loading_of
from coldsnap.releasing import WEIGHTS, recorded, require_seen
from coldsnap.session import Released, Session
from coldsnap.steps import OrderExport, OrderHydration, ReportLoad, StageRuntime, StageStartFiles

__all__ = [
    "START_FILES",
    "model_directory",
    "order_export",
    "order_hydration",
    "report_load",
    "stage_runtime",
    "stage_start_files",
]

START_FILES = f"{WEIGHTS}/start-files.tar"
"""Where an artifact has the archive of what its engine starts with."""


def model_directory(tree_dir: str) -> str:
    """Return where an engine that is started anew finds its model: the same path at every place."""
    return f"{tree_dir}/{MODEL}"


def stage_start_files(session: Session, step: StageStartFiles) -> Receipt:
    """Stage what the engine starts with: of its model at the capture, of the artifact at a restore."""
    trees = Trees(step.store)
    if session.artifact is None:
        tree = trees.add(_starting(session).start_files(inherited_environment()))
        path = session.need(session.writer, "an output").directory(WEIGHTS) / os.path.basename(START_FILES)
        write_file_durably(path, tree.archive.read_bytes())
    else:
        archive = session.need(session.artifact.descriptor.weights.start_files, "an artifact with start files")
        tree = trees.bring(session.artifact.path / archive.path, sha256=archive.sha256)
        place(session.living.rank_dir, MODEL, trees, tree.sha256)
    session.start_files = tree
    return Receipt(step=step.id, effective=str(tree.path), reason=tree.sha256[:19], bytes=tree.bytes)


def stage_runtime(session: Session, step: StageRuntime) -> Receipt:
    """Let the engine find the coldsnap that restores, verified and read-only, where its environment has another one."""
    environment = session.need(session.environment, "an environment")
    if code_digest(environment.packages.get("coldsnap", "")) == own_code_digest():
        return Receipt(
            step=step.id,
            effective="the coldsnap of the engine's environment",
            reason="it is the one that restores",
        )
    trees = Trees(step.store)
    tree = trees.add(activation_files())
    require_seen(session, [tree.path], what="the activation runtime cannot be read")
    place(session.living.rank_dir, ACTIVATION, trees, tree.sha256)
    return Receipt(step=step.id, effective=str(tree.path), reason=tree.sha256[:19], bytes=tree.bytes)


def order_export(session: Session, step: OrderExport) -> Receipt:
    """Say in the directive where the checkpoint is, and where the load is to write what it leaves."""
    writer = session.need(session.writer, "an output")
    engine, rank_dir = _starting(session), Path(session.living.rank_dir)
    model = described_model(session.need(session.model, "a model"))
    weights = writer.directory(WEIGHTS)
    place(rank_dir, MODEL, Trees(step.store), session.need(session.start_files, "start files").sha256)
    require_seen(session, [Store(step.store).prepare(), writer.path])
    export = Export(
        recovery=step.recovery,
        derived_buffer_max_bytes=step.derived_buffer_max_bytes,
        directory=str(weights),
        store=step.store,
        capture_id=session.name_capture(),
        model=ModelSource(model_id=model.id, revision=model.revision),
        backend=step.backend,
        write_mode=step.write_mode,
        reuse_blob=step.reuse_blob,
        queue_depth=step.queue_depth,
        chunk_bytes=step.chunk_bytes,
        native_library=step.native_library or None,
        native_sha256=step.native_sha256 or None,
    )
    checkpoint = Checkpoint(path=engine.checkpoint(inherited_environment()), load_format=session.load_format or "auto")
    directive = read_directive(rank_dir / layout.DIRECTIVE)
    write_directive(rank_dir, evolve(directive, export=export, checkpoint=checkpoint))
    return Receipt(step=step.id, requested=step.backend, effective=f"from {checkpoint.path}", reason=step.store)


def order_hydration(session: Session, step: OrderHydration) -> Receipt:
    """Say in the directive which packs, or what of the checkpoint, the load is to read, and how."""
    opened = session.need(session.artifact, "an artifact")
    rank_dir, store = Path(session.living.rank_dir), Store(step.store)
    sources, total = (_recovered if session.checkpoint else _packed)(session, store)
    require_seen(session, [opened.path, *([] if session.checkpoint else [store.directory])], what=UNREAD)
    hydration = Hydration(
        **reading_of(step),
        native_library=step.native_library or None,
        native_sha256=step.native_sha256 or None,
        loader=Loader(**_loader(step)) if session.checkpoint else None,
        workers=sources,
    )
    directive = read_directive(rank_dir / layout.DIRECTIVE)
    write_directive(rank_dir, evolve(directive, hydration=hydration))
    return Receipt(
        step=step.id,
        requested=step.loader_backend if session.checkpoint else step.backend,
        effective=f"{len(sources)} workers",
        reason="out of the checkpoint" if session.checkpoint else "out of packs",
        bytes=total,
    )


UNREAD = "weights cannot be read"


def _packed(session: Session, store: Store) -> tuple[tuple[WorkerSource, ...], int]:
    """Return where each worker finds its weights, and how many bytes of the model there are."""
    packs = {payload.worker: payload for payload in payloads_of(session)}
    sources = tuple(
        evolve(_beside(session, one), pack=str(store.path(packs[one.worker].sha256))) for one in _workers(session)
    )
    return sources, sum(payload.bytes for payload in packs.values())


def _recovered(session: Session, store: Store) -> tuple[tuple[WorkerSource, ...], int]:  # noqa: ARG001
    """Return the same for the checkpoint; whose files were compared when it was admitted."""
    sources = tuple(
        evolve(
            _beside(session, one),
            recovery_sha256=session.need(one.recovery_manifest, "an artifact with a checkpoint").sha256,
        )
        for one in _workers(session)
    )
    return sources, sum(os.stat(path).st_size for path in session.checkpoint)


def _workers(session: Session) -> tuple[WorkerWeights, ...]:
    return session.need(session.artifact, "an artifact").descriptor.weights.workers


def _beside(session: Session, one: WorkerWeights) -> WorkerSource:
    opened = session.need(session.artifact, "an artifact")
    return WorkerSource(
        worker=one.worker,
        directory=os.path.dirname(opened.path / one.native_manifest.path),
        manifest_sha256=one.native_manifest.sha256,
        index_sha256=session.need(one.bootstrap_index, "an artifact with bootstrap indexes").sha256,
    )


def _loader(step: OrderHydration) -> dict[str, Any]:
    told = dict(loading_of(step)["loader"])
    del told["verify_model_bytes"]  # samples of a memory that no template has
    return told


def report_load(session: Session, step: ReportLoad) -> Receipt:
    """Ask every worker what it did with its order; whoever did not carry it out fails the operation.

    Raises:
        EngineError: A worker did something else, or some did not report.
    """
    replies = request_control(session.living.rank_dir, "load_report", timeout_s=step.timeout_s, ended=session.ended)
    reports = {rank: reply for rank, reply in replies.items() if not reply.get("skipped")}
    wrong = {rank: reply for rank, reply in sorted(reports.items()) if not _as_told(session, step, reply)}
    others = [f"{rank} did {_did(reply)}" for rank, reply in wrong.items()]
    if others or len(reports) != session.spec.world_size:
        told = f"{len(reports)} of {session.spec.world_size} workers did a load that was ordered ({step.task})"
        raise EngineError("; ".join([told, *others]))
    return (_exported if step.task == "export" else _started)(session, step, reports)


def _did(reply: Mapping[str, Any]) -> str:
    return " by ".join(filter(None, [str(reply["task"]), str(reply.get("provider", ""))]))


def _as_told(session: Session, step: ReportLoad, reply: Mapping[str, Any]) -> bool:
    if step.task == "export":
        return bool(reply["task"] == "export")
    provider = "recovery" if session.checkpoint else "native"
    return (reply["task"], reply.get("provider")) == ("start", provider)


def _exported(session: Session, step: ReportLoad, reports: Mapping[str, Mapping[str, Any]]) -> Receipt:
    weights = session.need(session.writer, "an output").path / WEIGHTS
    session.released = {
        reply["worker"]: Released(
            rank=rank,
            directory=str(weights / reply["worker"]),
            manifest_sha256=reply["manifest_sha256"],
            pack_sha256=reply["pack"]["sha256"],
            pack_bytes=reply["pack"]["bytes"],
            new_pack_bytes=reply["pack"]["new_bytes"],
            residual_bytes=reply["residual"]["bytes"],
            seconds=sum(reply["seconds"].values()),
        )
        for rank, reply in reports.items()
    }
    every = session.released.values()
    pack, new, rest = (sum(getattr(one, name) for one in every) for name in _SIZES)
    return Receipt(
        step=step.id,
        effective=", ".join(sorted({str(reply["backend"]) for reply in reports.values()})),
        reason=f"{pack / 1e6:,.1f} MB in packs ({new / 1e6:,.1f} MB new), {rest / 1e6:,.1f} MB beside them",
        bytes=pack + rest,
        details={"pack_bytes": pack, "new_pack_bytes": new, "residual_bytes": rest, **recorded(reports)},
    )


_SIZES = ("pack_bytes", "new_pack_bytes", "residual_bytes")


def _started(session: Session, step: ReportLoad, reports: Mapping[str, Mapping[str, Any]]) -> Receipt:
    ahead = [one.cancel() for one in session.prefetches]
    every = reports.values()
    moved = {name: sum(int(reply["bytes"][name]) for reply in every) for name in ("pack", "checkpoint", "residual")}
    phases = sorted({name for reply in every for name in reply["seconds"]})
    effective = {str(receipt["effective"]) for reply in every for receipt in reply["receipts"].values()}
    return Receipt(
        step=step.id,
        effective=", ".join(sorted(effective)),
        reason=f"{sum(int(reply['matched']['extents']) for reply in every)} extents matched by semantic id",
        bytes=sum(moved.values()),
        details={
            "pack_bytes": sum(int(reply["pack_bytes"]) for reply in every),
            "pack_moved_bytes": moved["pack"],
            "checkpoint_bytes": moved["checkpoint"],
            "residual_bytes": moved["residual"],
            **checkpoint_figures(reports),
            "prefetched_bytes": sum(one.bytes for one in ahead),
            **{f"{name}_s": max(float(reply["seconds"].get(name, 0.0)) for reply in every) for name in phases},
        },
    )


def _starting(session: Session) -> StartsFromPacks:
    engine = session.spec
    if not isinstance(engine, StartsFromPacks):
        raise EngineError(f"{engine.kind} is never started from packs; make the plan with resolve()")
    return engine
