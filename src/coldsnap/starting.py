"""The steps of a template: proven, dumped, started, at its capture and wherever it comes back.

The one rule: a template that is not proven is never dumped, and one whose interpreter or engine has changed is never
thawed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from attrs import evolve

from coldsnap.accelerating import prepare
from coldsnap.artifact import Artifact, canonical
from coldsnap.describe import described_model
from coldsnap.drivers import n580
from coldsnap.engines.base import StartsFromPacks
from coldsnap.engines.code import TEMPLATE, TemplateFiles, changed, known, read_template_files
from coldsnap.engines.environment import EngineEnvironment, own_code_digest
from coldsnap.engines.environment_probe import code_digest
from coldsnap.engines.settings import inherited_environment, transport_environment
from coldsnap.errors import CompatibilityError, IntegrityError
from coldsnap.keeper import layout
from coldsnap.keeper.activation import finds_activation
from coldsnap.keeper.allowed import RUNTIME_NAMES, is_transport
from coldsnap.keeper.directive import Endpoint, Start, read_directive, write_directive
from coldsnap.keeper.template import MODULE, TRANSPORT, TRANSPORT_KIND
from coldsnap.receipts import Receipt
from coldsnap.sealing import CAPSULE
from coldsnap.session import Session
from coldsnap.steps import DumpTemplate, LaunchTemplate, ProveTemplate, StartEngine, VerifyCheckpoint

__all__ = ["dump_template", "prove", "require_same_files", "start_engine", "template_command", "verify_checkpoint"]


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
    environment = session.need(session.environment, "an environment")
    files = known(_parts(environment, session.spec.distribution))
    path = capsule / TEMPLATE
    path.write_bytes(TemplateFiles(stop=step.stop, files=files).encode())
    return Receipt(
        step=step.id,
        effective=f"{len(dumped.pids)} processes, waiting on",
        bytes=dumped.image_bytes + dumped.volatile_bytes,
        details=dumped.details,
    )


def _parts(environment: EngineEnvironment, distribution: str) -> list[str]:
    """Return what a started template runs: its interpreter, and the package of the engine."""
    return [environment.executable, *filter(None, [environment.packages.get(distribution, "")])]


def start_engine(session: Session, step: StartEngine) -> Receipt:
    """Write the directive that lets the template go on; the network's names first, which it needs by then."""
    keeper = session.living
    directive = read_directive(Path(keeper.rank_dir) / layout.DIRECTIVE)
    provider = step.provider
    if provider == "either":
        provider = "recovery" if session.checkpoint else "native"
    ordered = provider != "checkpoint" or directive.checkpoint is not None
    named = session.spec.start_load_format if isinstance(session.spec, StartsFromPacks) else None
    start = Start(unit=step.unit, phase=step.stop, load_format=named if ordered else None)
    endpoint = Endpoint(host=step.address, port=step.port)
    names: dict[str, str] = {}
    if directive.operation == "restore":
        planned = _placed(session, step, endpoint)
        names = {name: value for name, value in planned.items() if is_transport(name)}
        runtime = {name: value for name, value in planned.items() if name in RUNTIME_NAMES}
        start = evolve(start, environment=runtime, transport=TRANSPORT)
        _hand_over(keeper.rank_dir, step.unit, directive.incarnation, names)
    write_directive(keeper.rank_dir, evolve(directive, provider=provider, endpoint=endpoint, start=start))
    return Receipt(
        step=step.id,
        effective=f"weights by {provider}",
        reason=f"{len(names)} names of the network are those of here" if names else "",
    )


def _placed(session: Session, step: StartEngine, endpoint: Endpoint) -> dict[str, str]:
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
    """Refuse a template whose interpreter or engine is not what it was: it would run what is there now.

    Another coldsnap is no reason where the engine finds an activation runtime first.

    Raises:
        CompatibilityError: With everything that changed.
    """
    (capsule,) = opened.descriptor.capsule.units
    recorded = read_template_files(opened.path / capsule.path)
    differs = changed(recorded.files)
    replaced = recorded.stop == "pre_exec" and finds_activation(opened.descriptor.engine.environment)
    if not replaced and code_digest(environment.packages.get("coldsnap", "")) != own_code_digest():
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
