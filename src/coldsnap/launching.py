"""The steps that bring an engine up and end it: admit, launch, wait until it is ready, hand over, stop."""

from __future__ import annotations

import json
import os
import shutil
import socket
from contextlib import closing
from typing import cast

from coldsnap.anew import model_directory
from coldsnap.artifact.durable import COMMITTED
from coldsnap.engines.argument_limits import last_value
from coldsnap.engines.base import StartsFromPacks
from coldsnap.engines.caches import managed
from coldsnap.engines.endpoint import await_ready
from coldsnap.engines.environment import require_interpreter
from coldsnap.engines.settings import inherited_environment
from coldsnap.engines.specs import COMMAND, SPEC, EngineRecord, spec_from_text
from coldsnap.errors import AdmissionError
from coldsnap.host.doctor import problems
from coldsnap.host.probe import probe
from coldsnap.keeper import layout
from coldsnap.keeper.activation import activation_environment
from coldsnap.keeper.client import Keeper
from coldsnap.keeper.directive import Directive, Endpoint, write_directive
from coldsnap.keeper.handle import Engine as Handle
from coldsnap.keeper.load_failure import told
from coldsnap.keeper.rundir import new_name, run_dir_for
from coldsnap.keeper.stem import wrapped
from coldsnap.keeper.undo import KILL, remove
from coldsnap.receipts import Receipt
from coldsnap.seeding import make_room, startup_told
from coldsnap.session import Session
from coldsnap.starting import template_command
from coldsnap.steps import (
    AdmitEngine,
    AdmitHost,
    AdmitPlacement,
    AwaitReady,
    HandOver,
    LaunchEngine,
    LaunchTemplate,
    StopEngine,
)

__all__ = ["ENVIRONMENT", "admit_engine", "admit_host", "admit_placement", "hand_over", "launch", "ready", "stop"]

SOCKET_PATH_BYTES = 107  # unix(7): sun_path, without its NUL
ENVIRONMENT = "environment"


def admit_host(session: Session, step: AdmitHost) -> Receipt:
    """Probe again: facts may be hours old, and from another boot."""
    host = probe(criu=step.criu or None).host("local")
    session.host = host
    _ = session.library  # one that is not the pinned build is refused here, before anything is started
    if host.boot_id != step.boot_id:
        raise AdmissionError(f"{step.host} has been booted since its facts were probed; probe and resolve again")
    if host.criu is not None and host.criu.build_digest != step.criu_digest:
        raise AdmissionError(f"the CRIU at {step.criu} is another build than the plan's; probe and resolve again")
    if found := problems(host, namespace=step.namespace):
        raise AdmissionError(f"{step.host} cannot run CRIU", found)
    return Receipt(step=step.id, effective=f"CRIU {'.'.join(map(str, host.criu.version if host.criu else ()))}")


def admit_engine(session: Session, step: AdmitEngine) -> Receipt:
    """Look into the engine's environment and at the model, before anything starts."""
    launch = session.plan["launch"]
    assert isinstance(launch, LaunchEngine)  # noqa: S101 - resolve puts both in a plan or neither
    session.engine = engine = spec_from_text(launch.spec)
    # The cheap looks first: to ask the interpreter takes a second on a busy machine.
    require_interpreter(step.python)
    engine.require_model(inherited_environment())
    session.environment = engine.inspect(inherited_environment() | dict(launch.environment))
    engine.admit(session.environment)
    session.model = engine.identify(inherited_environment())
    version = session.environment.versions.get(engine.distribution, "")
    return Receipt(step=step.id, effective=f"{step.kind} {version}", reason=f"model {session.model.revision[:19]}")


def admit_placement(_: Session, step: AdmitPlacement) -> Receipt:
    """Check that the port can be bound: facts only know who listened a while ago."""
    family = socket.AF_INET6 if ":" in step.address else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe_socket:
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind((step.address, step.port))
        except OSError as error:
            raise AdmissionError(
                f"{step.address}:{step.port} cannot be bound ({os.strerror(error.errno or 0)}): stop what uses it, "
                "or place the engine on another port"
            ) from error
    return Receipt(step=step.id, effective=f"{step.address}:{step.port} is free")


def launch(session: Session, step: LaunchEngine) -> Receipt:
    """Start keeper and engine; until the end of the operation a dead caller takes both with it."""
    engine = session.spec
    environ = inherited_environment() | dict(step.environment)
    run_dir = step.run_dir or str(run_dir_for(step.name or new_name(engine.kind)))
    _require_short(run_dir, step.namespace)
    record = EngineRecord(spec=step.spec, environment=session.need(session.environment, "an environment"))
    further = engine.installed_arguments(step.argv, record.environment, environ=environ)
    argv = (*step.argv, *further)
    tree_dir = layout.IN_PROCESS_DIR if step.namespace == "private" else os.path.join(run_dir, layout.RANK)
    if isinstance(step, LaunchTemplate) and step.stop == "pre_exec":
        environ = activation_environment(environ, tree_dir)  # nothing is there yet: a restore may place another one
    if session.start_files is not None:
        session.load_format = last_value(argv, "--load-format", default="auto")
        argv = cast("StartsFromPacks", engine).with_start_files(argv, model_directory(tree_dir))
    labels = {
        "engine": step.kind,
        SPEC: step.spec,
        ENVIRONMENT: record.to_text(),
        COMMAND: json.dumps({"argv": argv, "environment": environ, "cwd": step.cwd}),
    }
    make_room([*managed(dict(step.environment)).values()])
    keeper = session.take(Keeper.start(run_dir, namespace=step.namespace, labels=labels))
    keeper.begin(session.plan.operation, [KILL])
    if session.writer is not None:
        keeper.undo(remove(session.writer.path, unless=COMMITTED))
    endpoint = Endpoint(host=step.address, port=step.port)
    write_directive(keeper.rank_dir, Directive.new(operation="launch", endpoint=endpoint))
    python = shutil.which(argv[0], path=environ.get("PATH")) or argv[0]
    command = (python, *argv[1:])
    started = (
        template_command(session, step, command)
        if isinstance(step, LaunchTemplate)
        else wrapped(command, python=python)
    )
    pid = keeper.spawn_engine(started, env=environ, cwd=step.cwd)
    added = f", with {' '.join(further)}: installed there" if further else ""
    return Receipt(step=step.id, effective=f"pid {pid}", reason=f"run directory {run_dir}{added}")


def _require_short(run_dir: str, namespace: str) -> None:
    """Refuse a run directory in which no rank could bind its socket: in private namespaces ranks see a short path."""
    longest = os.path.join(run_dir, "rank", "control", "engine.4194304.sock")
    if namespace == "host" and len(os.fsencode(longest)) > SOCKET_PATH_BYTES:
        allowed = len(os.fsencode(run_dir)) - (len(os.fsencode(longest)) - SOCKET_PATH_BYTES)
        raise AdmissionError(
            f"the run directory {run_dir} is too long for process.namespace = 'host': its ranks bind sockets below it, "
            f"and those paths have a limit; use one of at most {allowed} bytes"
        )


def ready(session: Session, step: AwaitReady) -> Receipt:
    """Wait for port and health, then for the control socket of every rank."""
    endpoint, environment = session.endpoint, session.need(session.environment, "an environment")
    closed = session.plan.operation == "restore"
    path, log = session.spec.ready_path(environment, closed=closed), session.living.log_path
    if path is None:
        seconds = session.ranks.await_ready(timeout_s=step.timeout_s, closed=closed, log=log)
    else:
        with told(session.living.rank_dir):
            seconds = await_ready(endpoint, timeout_s=step.timeout_s, health_path=path, ended=session.ended, log=log)
    ranks = session.ranks.require(session.spec.roles(gpu=session.gpu, environment=environment))
    details = {"health_s": seconds, **startup_told(session)}
    return Receipt(step=step.id, effective=endpoint.url, reason=f"{len(ranks)} ranks", details=details)


def hand_over(session: Session, step: HandOver) -> Receipt:
    """Open the engine to everybody, and give it to the caller."""
    keeper = session.living
    session.ranks.resume()
    keeper.end()
    session.keeper = None
    session.report.engine = handle = Handle(keeper)
    session.report.workload = f"the engine serves at {session.report.engine.endpoint.url}"
    return Receipt(step=step.id, effective=handle.endpoint.url, reason=f"run directory {handle.run_dir}")


def stop(session: Session, step: StopEngine) -> Receipt:
    """End an engine for good."""
    with Keeper.connect(step.run_dir) as keeper:
        ended = keeper.stop(grace_s=step.grace_s)
    session.report.workload = "the engine was stopped"
    return Receipt(step=step.id, effective="stopped", reason=str(ended or "it had ended"))
