"""``Engine``: what a user holds of a running engine.

The one rule: a handle never decides an engine's life by being forgotten: closing or losing it leaves the engine
serving; only ``stop()``, or leaving a ``with`` block without ``detach()``, ends it.
"""

from __future__ import annotations

import contextlib
import html
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from attrs import frozen

from coldsnap.errors import ColdSnapError, EngineError, StepTimeout
from coldsnap.keeper import layout
from coldsnap.keeper.client import Keeper
from coldsnap.keeper.directive import Directive, Endpoint, read_directive
from coldsnap.keeper.rundir import PostMortem, post_mortem, run_dir_for, run_root
from coldsnap.keeper.status import Exit, Interrupted, Process, Status

__all__ = ["Engine", "EngineStatus", "list_engines"]

_LOOK_S = 0.5  # how long a dead rank may go unnoticed by a wait, s


@frozen(kw_only=True)
class EngineStatus:
    """How an engine is.

    Attributes:
        name: Its name.
        run_dir: Its run directory.
        state: ``starting`` (a launch or restore is under way), ``running``, ``stopped`` (frozen), ``failed`` (its root
            runs, but a rank of it is dead: stop it), ``exited`` (by itself), ``gone`` (stopped on request, killed, or
            never there).
        root_pid: In the tree's pid namespace.
        since_unix_ns: When it was started or restored.
        exit: How its root ended, when somebody saw it.
        operation: What is in flight.
        interrupted: What was undone last, and why.
        endpoint: Where it answers.
        incarnation: Which launch or restore this is.
        story: What became of it, once it is no more or has failed.
    """

    name: str
    run_dir: Path
    state: Literal["starting", "running", "stopped", "failed", "exited", "gone"]
    root_pid: int | None = None
    since_unix_ns: int | None = None
    exit: Exit | None = None
    operation: str | None = None
    interrupted: Interrupted | None = None
    endpoint: Endpoint | None = None
    incarnation: str | None = None
    story: str = ""


class Engine:
    """A handle of an engine that a keeper keeps.

    As a context manager it stops the engine at the end of the block, unless it was detached.

    Attributes:
        keeper: The connection to its keeper.
    """

    def __init__(self, keeper: Keeper, *, name: str | None = None) -> None:
        self.keeper = keeper
        self._name = name or keeper.run_dir.name
        self._directive: Directive | None = None
        self._detached = False

    @classmethod
    def attach(cls, run_dir_or_name: str | os.PathLike[str], *, timeout_s: float = 5.0) -> Self:
        """Find an engine again.

        Args:
            run_dir_or_name: Its run directory, or its name when that is below the run root.
            timeout_s: For its keeper to answer.

        Raises:
            EngineError: It is no more; with what became of it and the last lines of its log. What a dead operation left
                half done is cleaned up by then.
            StepTimeout: Its keeper does not answer.
        """
        return cls(Keeper.connect(_place(run_dir_or_name), timeout_s=timeout_s))

    # Who

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def run_dir(self) -> Path:
        """Its run directory."""
        return self.keeper.run_dir

    @property
    def labels(self) -> Mapping[str, str]:
        """What the one who started it wrote down."""
        return self.keeper.labels

    @property
    def endpoint(self) -> Endpoint:
        """Where it answers.

        Raises:
            EngineError: Nobody has said so yet.
        """
        directive = self._told()
        if directive is None:
            raise EngineError(f"{self.name} has no endpoint yet: it was neither launched nor restored")
        return directive.endpoint

    def _told(self) -> Directive | None:
        with contextlib.suppress(FileNotFoundError):  # not yet, or no more: then what was read last
            self._directive = read_directive(self.keeper.rank_dir / layout.DIRECTIVE)
        return self._directive

    # How

    def status(self) -> EngineStatus:
        """Ask how it is; an engine that is no more has a status too."""
        try:
            status = self.keeper.status()
        except ColdSnapError:
            found = post_mortem(self.run_dir)
            if found.alive:
                raise
            return _dead(self.name, self.run_dir, found)
        return self._living(status)

    def _living(self, status: Status) -> EngineStatus:
        directive = self._told()
        return EngineStatus(
            name=self.name,
            run_dir=self.run_dir,
            state=_state(status),
            root_pid=status.root_pid,
            since_unix_ns=status.since_unix_ns,
            exit=status.exit,
            operation=status.operation,
            interrupted=status.interrupted,
            endpoint=None if directive is None else directive.endpoint,
            incarnation=None if directive is None else directive.incarnation,
            story=status.loss,
        )

    def processes(self) -> tuple[Process, ...]:
        """Return its processes, the root first; pids are those of its own namespace."""
        return self.keeper.tree()

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines that it wrote."""
        return self.keeper.log_tail(lines)

    # The end

    def wait(self, timeout_s: float | None = None) -> EngineStatus:
        """Wait until it is no more, or has failed: then its root still runs, and ``stop`` ends it.

        Args:
            timeout_s: None waits for ever.

        Raises:
            StepTimeout: It still serves.
        """
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self.keeper.wait(min(_LOOK_S, max(0.0, end - time.monotonic()))):
            if (status := self.status()).state == "failed":
                return status
            if time.monotonic() >= end:
                raise StepTimeout(f"{self.name} still runs after {timeout_s} s", seconds=timeout_s or 0.0)
        return _dead(self.name, self.run_dir, post_mortem(self.run_dir, patience_s=1.0))

    def stop(self, grace_s: float = 10.0) -> Exit | None:
        """Stop it and remove its run directory; stopping what is no more is fine.

        Args:
            grace_s: Between SIGTERM to its root and SIGKILL to all of it.

        Returns:
            How its root ended, None when it was no more.
        """
        try:
            return self.keeper.stop(grace_s)
        except (ColdSnapError, OSError):
            if post_mortem(self.run_dir).alive:
                raise
            return None
        finally:
            self._detached = True
            self.keeper.close()

    def detach(self) -> None:
        """Let go of it: it serves on, and can be attached again."""
        self._detached = True
        self.keeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._detached:
            self.stop()

    def _facts(self) -> dict[str, str]:
        try:
            status = self.status()
        except ColdSnapError as error:  # a notebook shows this object: it must not raise
            return {"state": f"unknown: {error}"}
        facts = {"state": status.state, "run directory": str(self.run_dir)}
        if status.endpoint is not None:
            facts["endpoint"] = status.endpoint.url
        if status.operation is not None:
            facts["in flight"] = status.operation
        if status.interrupted is not None:
            facts["undone"] = f"{status.interrupted.operation}: {status.interrupted.why}"
        return facts

    def __repr__(self) -> str:
        if self._detached:
            return f"Engine({self.name!r}, detached)"
        facts = self._facts()
        return f"Engine({self.name!r}, {facts['state']}, {facts.get('endpoint', 'no endpoint')})"

    def _repr_html_(self) -> str:
        facts = {"state": "detached"} if self._detached else self._facts()
        rows = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in facts.items())
        return f"<table><caption>{html.escape(self.name)}</caption>{rows}</table>"


def list_engines(run_root_dir: str | os.PathLike[str] | None = None) -> tuple[EngineStatus, ...]:
    """Return every engine below a run root, dead ones with an outcome included, by name.

    Args:
        run_root_dir: Default: the user's own.
    """
    root = Path(run_root() if run_root_dir is None else run_root_dir)
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return ()
    return tuple(_look(root / name) for name in names)


def _look(run_dir: Path) -> EngineStatus:
    try:
        engine = Engine.attach(run_dir, timeout_s=2.0)
    except ColdSnapError as error:
        found = post_mortem(run_dir)
        if found.alive:
            return EngineStatus(name=run_dir.name, run_dir=run_dir, state="starting", story=str(error))
        return _dead(run_dir.name, run_dir, found)
    try:
        return engine.status()
    finally:
        engine.detach()


def _state(status: Status) -> Literal["starting", "running", "stopped", "failed", "exited"]:
    if status.state == "empty":
        return "starting"
    return "failed" if status.lost and status.state == "running" else status.state


def _place(run_dir_or_name: str | os.PathLike[str]) -> Path:
    text = os.fspath(run_dir_or_name)
    return Path(os.path.abspath(text)) if os.sep in text else run_dir_for(text)


def _dead(name: str, run_dir: Path, found: PostMortem) -> EngineStatus:
    interrupted = None
    if found.operation is not None:
        interrupted = Interrupted(operation=found.operation, why=found.story, undone=found.undone)
    return EngineStatus(
        name=name,
        run_dir=run_dir,
        state="exited" if found.state == "exited" else "gone",
        exit=Exit.of(found.exit),
        interrupted=interrupted,
        story=found.story,
    )
