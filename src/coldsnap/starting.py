"""The steps of a template: proven, dumped, started, at its capture and wherever it comes back.

The one rule: a template that is not proven is never dumped, and one whose interpreter or engine has changed is never
thawed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from coldsnap.accelerating import prepare
from coldsnap.artifact import Artifact, canonical
from coldsnap.artifact.manifest import ModelSource
from coldsnap.artifact.store import Store
from coldsnap.describe import described_model
from coldsnap.drivers import n580
from coldsnap.engines.code import TEMPLATE, TemplateFiles, changed, known, read_template_files
from coldsnap.engines.environment import EngineEnvironment, own_code_digest
from coldsnap.engines.environment_probe import code_digest
from coldsnap.engines.model import TEXT_SUFFIXES
from coldsnap.engines.settings import inherited_environment, transport_environment
from coldsnap.errors import CompatibilityError, EngineError, IntegrityError
from coldsnap.hydrating import reading_of
from coldsnap.keeper import layout
from coldsnap.keeper.allowed import RUNTIME_NAMES, is_transport
from coldsnap.keeper.directive import (
    Endpoint,
    Export,
    Hydration,
    Start,
    WorkerSource,
    read_directive,
    write_directive,
)
from coldsnap.keeper.template import MODULE, TRANSPORT, TRANSPORT_KIND
from coldsnap.receipts import Receipt
from coldsnap.releasing import WEIGHTS, require_seen
from coldsnap.sealing import CAPSULE
from coldsnap.session import Released, Session
from coldsnap.steps import (
    DumpTemplate,
    ExportLoad,
    FillLoad,
    LaunchTemplate,
    ProveTemplate,
    ReportLoad,
    StartEngine,
    VerifyCheckpoint,
)

__all__ = [
    "dump_template",
    "prove",
    "report_load",
    "require_same_files",
    "start_engine",
    "template_command",
    "verify_checkpoint",
]


def template_command(session: Session, step: LaunchTemplate, argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return what is started in place of an engine's command: the same command, waiting.

    Args:
        session: The capture's.
        step: Where it waits.
        argv: The engine's command.
    """
    environment = session.need(session.environment, "an environment")
    if step.stop == "imported":
        return (argv[0], "-m", MODULE, "imported", ",".join(session.spec.imported), *argv)
    launcher = os.path.join(environment.packages["coldsnap"], *MODULE.split(".")[1:]) + ".py"
    return (argv[0], "-I", "-S", launcher, "pre_exec", *argv)


def prove(session: Session, step: ProveTemplate) -> Receipt:
    """Wait for the template, and refuse what is not proven to be free of accelerators."""
    keeper = session.living
    prepare(session)
    said = n580.await_template(keeper, timeout_s=step.timeout_s, ended=session.ended)
    proven = n580.prove_template(keeper, step.stop, said)
    return Receipt(
        step=step.id,
        effective=f"{len(proven.pids)} processes without a context, {step.stop}",
        reason="; ".join(proven.driver[:4]) or "no device, no library of a driver",
        details={"looks": proven.looks, "proof_s": proven.seconds},
    )


def dump_template(session: Session, step: DumpTemplate) -> Receipt:
    """Write the image, and what the engine's files are; the template waits on."""
    writer = session.need(session.writer, "an output")
    capsule, cuda = writer.directory(CAPSULE), session.cuda
    pids, devices = ((), ()) if cuda is None else (cuda.pids, cuda.held)
    session.dumped = dumped = n580.dump_template(
        session.living, step.criu, capsule, timeout_s=step.timeout_s, nvidia_pids=pids, devices=devices
    )
    files = known(_parts(session))
    path = capsule / TEMPLATE
    path.write_bytes(TemplateFiles(stop=step.stop, files=files).encode())
    return Receipt(
        step=step.id,
        effective=f"{len(dumped.pids)} processes, waiting on",
        bytes=dumped.image_bytes + dumped.volatile_bytes,
        details=dumped.details,
    )


def _parts(session: Session) -> list[str]:
    """Return what a started template reads besides weights: interpreter, engine, and the small files of its model."""
    environment = session.need(session.environment, "an environment")
    model = session.need(session.model, "a model")
    package = environment.packages.get(session.spec.distribution, "")
    small = [os.path.join(model.model, file.name) for file in model.files if file.name.endswith(TEXT_SUFFIXES)]
    return [environment.executable, *filter(None, [package]), *small]


def start_engine(session: Session, step: StartEngine | ExportLoad | FillLoad) -> Receipt:
    """Write the directive that lets the template go on; the network's names first, which it needs by then."""
    keeper = session.living
    directive = read_directive(Path(keeper.rank_dir) / layout.DIRECTIVE)
    start = Start(unit=step.unit, phase=step.stop, load_format="coldsnap" if isinstance(step, FillLoad) else None)
    endpoint = Endpoint(host=step.address, port=step.port)
    names: dict[str, str] = {}
    if directive.operation == "restore":
        planned = _placed(session, step, endpoint)
        names = {name: value for name, value in planned.items() if is_transport(name)}
        runtime = {name: value for name, value in planned.items() if name in RUNTIME_NAMES}
        start = evolve(start, environment=runtime, transport=TRANSPORT)
        _hand_over(keeper.rank_dir, step.unit, directive.incarnation, names)
    told = evolve(directive, provider=step.provider, endpoint=endpoint, start=start)
    if isinstance(step, ExportLoad):
        told = evolve(told, export=_export(session, step))
    elif isinstance(step, FillLoad):
        told = evolve(told, hydration=_hydration(session, step))
    write_directive(keeper.rank_dir, told)
    return Receipt(
        step=step.id,
        effective=f"weights by {step.provider}",
        reason=f"{len(names)} names of the network are those of here" if names else "",
    )


def _export(session: Session, step: ExportLoad) -> Export:
    writer, model = session.need(session.writer, "an output"), described_model(session.need(session.model, "a model"))
    directories = [writer.directory(f"{WEIGHTS}/worker-{rank}") for rank in range(session.spec.world_size)]
    require_seen(session, [Store(step.store).prepare(), writer.path])
    return Export(
        directory=str(directories[0].parent),
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


def _hydration(session: Session, step: FillLoad) -> Hydration:
    opened = session.need(session.artifact, "an artifact")
    payloads = session.need(opened.descriptor.weights.payloads, "an artifact with packs").objects
    packs = {payload.worker: str(Store(step.store).path(payload.sha256)) for payload in payloads}
    return Hydration(
        **reading_of(step),
        native_library=step.native_library or None,
        native_sha256=step.native_sha256 or None,
        workers=tuple(
            WorkerSource(
                worker=one.worker,
                directory=os.path.dirname(opened.path / one.native_manifest.path),
                manifest_sha256=one.native_manifest.sha256,
                pack=packs[one.worker],
                index_sha256=session.need(one.bootstrap_index, "a bootstrap index").sha256,
            )
            for one in opened.descriptor.weights.workers
        ),
    )


def report_load(session: Session, step: ReportLoad) -> Receipt:
    """Take from every worker what its load did; at a capture that is what the artifact says of the weights."""
    ahead = [one.cancel() for one in session.prefetches]
    replies = session.ranks.load_report(timeout_s=step.timeout_s)
    expected = [f"worker-{rank}" for rank in range(session.spec.world_size)]
    done = sorted(str(reply["worker"]) for reply in replies.values() if reply["task"] == step.task)
    if done != expected or len(replies) != len(done):
        told = ", ".join(f"{rank}: {reply['task']} {reply['worker']}" for rank, reply in sorted(replies.items()))
        raise EngineError(f"expected a load to {step.task} from each of {', '.join(expected)}, found {told or 'none'}")
    if step.task == "export":
        return _exported(session, step, replies)
    moved = sum(reply["bytes"]["pack"] + reply["bytes"]["residual"] for reply in replies.values())
    return Receipt(
        step=step.id,
        effective=f"{sum(reply['matched']['extents'] for reply in replies.values())} extents by name",
        reason=f"{sum(reply['pack_bytes'] for reply in replies.values()) / 1e6:,.1f} MB of packs",
        bytes=moved,
        details={
            "pack_bytes": sum(reply["pack_bytes"] for reply in replies.values()),
            "pack_moved_bytes": sum(reply["bytes"]["pack"] for reply in replies.values()),
            "prefetched_bytes": sum(one.bytes for one in ahead),
            **{
                f"{name}_s": max(reply["seconds"].get(name, 0.0) for reply in replies.values())
                for name in ("admit", "match", "pack", "residual")
            },
        },
    )


def _exported(session: Session, step: ReportLoad, replies: Mapping[str, Mapping[str, Any]]) -> Receipt:
    writer = session.need(session.writer, "an output")
    session.released = {
        str(reply["worker"]): Released(
            rank=rank,
            directory=str(writer.directory(f"{WEIGHTS}/{reply['worker']}")),
            manifest_sha256=reply["manifest_sha256"],
            pack_sha256=reply["pack"]["sha256"],
            pack_bytes=reply["pack"]["bytes"],
            new_pack_bytes=reply["pack"]["new_bytes"],
            residual_bytes=reply["residual"]["bytes"],
            seconds=sum(reply["seconds"].values()),
        )
        for rank, reply in replies.items()
    }
    every = session.released.values()
    pack, residual = sum(one.pack_bytes for one in every), sum(one.residual_bytes for one in every)
    return Receipt(
        step=step.id,
        effective=f"{pack / 1e6:,.1f} MB in packs, {residual / 1e6:,.1f} MB beside them",
        reason="; ".join(str(reply["coverage"]) for reply in replies.values()),
        bytes=pack + residual,
        details={"pack_bytes": pack, "residual_bytes": residual, "export_s": max(one.seconds for one in every)},
    )


def _placed(session: Session, step: StartEngine | ExportLoad | FillLoad, endpoint: Endpoint) -> dict[str, str]:
    """Return the environment that a launch would have here."""
    gpu = session.gpu
    environment = dict(session.spec.launch_command(endpoint, environ=inherited_environment(), gpu=gpu).env)
    if step.devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, step.devices))
    return environment | transport_environment()


def _hand_over(rank_dir: Path, unit: str, incarnation: str, names: dict[str, str]) -> None:
    document: dict[str, Any] = {
        "format": 1,
        "kind": TRANSPORT_KIND,
        "unit": unit,
        "incarnation": incarnation,
        "variables": names,
    }
    dir_fd = os.open(rank_dir, layout.DIRECTORY)
    try:
        layout.replace(dir_fd, TRANSPORT, canonical.encode(document))
    finally:
        os.close(dir_fd)


def require_same_files(opened: Artifact, environment: EngineEnvironment) -> None:
    """Refuse a template whose interpreter, engine or coldsnap is not what it was: it would run what is there now.

    Raises:
        CompatibilityError: With everything that changed.
    """
    (capsule,) = opened.descriptor.capsule.units
    recorded = read_template_files(opened.path / capsule.path)
    differs = changed(recorded.files)
    if code_digest(environment.packages.get("coldsnap", "")) != own_code_digest():
        differs.append("the coldsnap in the engine's environment is not the one that restores; install the same one")
    if differs:
        raise CompatibilityError(f"the engine of {opened.path} would not be what was captured", differs)


def verify_checkpoint(session: Session, step: VerifyCheckpoint) -> Receipt:
    """Compare the model at its path with the captured one; no answer is accepted before."""
    model = described_model(session.spec.identify(inherited_environment()))
    if model.revision != step.revision:
        raise IntegrityError(
            "the model that the engine loads is not the captured one",
            path=model.path or model.id,
            expected=step.revision,
            actual=model.revision,
        )
    return Receipt(step=step.id, effective="the captured model", reason=model.revision[:19])
