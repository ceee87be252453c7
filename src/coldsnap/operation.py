"""What is to be done: operations and where they take place. Frozen data; nothing here acts.

An operation names an engine or an artifact, and a placement. ``resolve`` turns it into a plan.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from attrs import field, frozen

from coldsnap.errors import PolicyError

__all__ = [
    "ArtifactLike",
    "Capture",
    "Delete",
    "EngineHandle",
    "EngineSpec",
    "Launch",
    "Operation",
    "Placement",
    "Publish",
    "Restore",
    "Stop",
    "UnitPlacement",
    "Verify",
    "local",
]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

DEFAULT_PROMPT = "Reply with exactly: coldsnap"
DEFAULT_ANSWER_TOKENS = 16


@runtime_checkable
class EngineSpec(Protocol):
    """What a user writes to describe an engine: ``VLLM``, ``SGLang``, or the reference engine of the tests."""

    kind: ClassVar[str]

    @property
    def python(self) -> str:
        """Return the interpreter that it runs in."""


@runtime_checkable
class EngineHandle(Protocol):
    """A running engine: what ``report.engine`` and ``Engine.attach`` give."""

    @property
    def run_dir(self) -> Path:
        """Return the run directory of the engine's keeper."""


@runtime_checkable
class ArtifactLike(Protocol):
    """A committed artifact that has been opened."""

    @property
    def path(self) -> Path:
        """Return the artifact's directory."""


def _port(_instance: object, _attribute: object, value: int) -> None:
    if not 1 <= value <= 65535:
        raise PolicyError(
            [("$.placement.port", f"expected a TCP port from 1 to 65535, found {value}")], what="operation"
        )


def _name(_instance: object, _attribute: object, value: str | None) -> None:
    if value is not None and not NAME.fullmatch(value):
        raise PolicyError(
            [("$.placement.name", f"expected letters, digits, '.', '_' and '-' (at most 64), found {value!r}")],
            what="operation",
        )


def _absolute(value: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.fspath(value))


def _absolute_each(value: Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    # A text is a sequence of texts too: each letter of it would be a directory.
    return tuple(map(_absolute, (value,) if isinstance(value, str | os.PathLike) else value))


def _optional_absolute(value: str | os.PathLike[str] | None) -> str | None:
    return None if value is None else _absolute(value)


@frozen(kw_only=True)
class UnitPlacement:
    """Where one unit (the processes of one host) lives.

    Attributes:
        unit: The unit's id, ``unit-0`` for the first.
        host: A host name of ``Facts.hosts``.
        devices: GPU ordinals on that host, in rank order; empty means none.
        address: The address the HTTP front end listens on.
        port: Its TCP port.
    """

    unit: str = "unit-0"
    host: str = "local"
    devices: tuple[int, ...] = ()
    address: str = "127.0.0.1"
    port: int = field(validator=_port)


@frozen(kw_only=True)
class Placement:
    """Units on hosts.

    Attributes:
        units: At least one; the first owns the HTTP front end.
        name: The name of the run directory below the run root; made up when ``None``.
        run_dir: The run directory itself, absolute; overrides ``name``.
    """

    units: tuple[UnitPlacement, ...]
    name: str | None = field(default=None, validator=_name)
    run_dir: str | None = field(default=None, converter=_optional_absolute)

    def __attrs_post_init__(self) -> None:
        ids = [unit.unit for unit in self.units]
        if not ids or len(set(ids)) != len(ids):
            raise PolicyError(
                [("$.placement.units", f"expected distinct units, at least one, found {ids}")], what="operation"
            )
        if "\0" in (self.run_dir or ""):
            raise PolicyError([("$.placement.run_dir", "expected a path without NUL")], what="operation")

    @property
    def front(self) -> UnitPlacement:
        """Return the unit with the HTTP front end."""
        return self.units[0]


def local(
    *,
    port: int,
    address: str = "127.0.0.1",
    devices: Sequence[int] = (),
    name: str | None = None,
    run_dir: str | os.PathLike[str] | None = None,
) -> Placement:
    """Place everything on the probed host ``local``.

    Args:
        port: The TCP port of the HTTP front end.
        address: The address it listens on.
        devices: GPU ordinals in rank order.
        name: The name of the run directory below the run root.
        run_dir: The run directory itself.

    Raises:
        PolicyError: A port outside 1 to 65535, or a name that cannot be a directory name.
    """
    unit = UnitPlacement(devices=tuple(devices), address=address, port=port)
    return Placement(units=(unit,), name=name, run_dir=None if run_dir is None else os.fspath(run_dir))


def _positive(_instance: object, _attribute: object, value: float) -> None:
    if not value > 0:
        name = getattr(_attribute, "name", "value")
        raise PolicyError([(f"$.{name}", f"expected a positive number, found {value}")], what="operation")


@frozen(kw_only=True)
class Launch:
    """Start an engine under a keeper and wait until it answers.

    Attributes:
        engine: What to start.
        placement: Where.
        ready_timeout_s: How long it may take to answer, s.
    """

    engine: EngineSpec = field(kw_only=False)
    placement: Placement
    ready_timeout_s: float = field(default=1800.0, validator=_positive)


@frozen(kw_only=True)
class Capture:
    """Capture an engine into an artifact.

    Attributes:
        engine: What to launch, or the handle of an engine that has been serving since it was launched.
        output: The artifact's directory; it must not exist.
        placement: Where to launch; not given with a handle.
        then: What becomes of the workload after the commit: ``stop`` (default) or ``keep``.
        prompt: The prompt of the acceptance request.
        answer_tokens: How many tokens of the answer are compared, 1 to 512.
        ready_timeout_s: How long a launched engine may take to answer, s.
        quiesce_timeout_s: How long requests in flight may take to end, s.
        dump_timeout_s: How long the dump may take, s.
    """

    engine: EngineSpec | EngineHandle = field(kw_only=False)
    output: str = field(converter=_absolute)
    placement: Placement | None = None
    then: Literal["stop", "keep"] = "stop"
    prompt: str = DEFAULT_PROMPT
    answer_tokens: int = DEFAULT_ANSWER_TOKENS
    ready_timeout_s: float = field(default=1800.0, validator=_positive)
    quiesce_timeout_s: float = field(default=60.0, validator=_positive)
    dump_timeout_s: float = field(default=600.0, validator=_positive)

    def __attrs_post_init__(self) -> None:
        problems = []
        if isinstance(self.engine, EngineHandle) == (self.placement is not None):
            expected = (
                "no placement with the handle of a running engine" if self.placement else "a placement for the launch"
            )
            problems.append(("$.placement", f"expected {expected}"))
        if self.then not in ("stop", "keep"):
            problems.append(("$.then", f"expected 'stop' or 'keep', found {self.then!r}"))
        if "\0" in self.output:
            problems.append(("$.output", "expected a path without NUL"))
        if not self.prompt or "\0" in self.prompt:
            problems.append(("$.prompt", "expected a text that is not empty and has no NUL"))
        if not 1 <= self.answer_tokens <= 512:
            problems.append(("$.answer_tokens", f"expected 1 to 512, found {self.answer_tokens}"))
        if problems:
            raise PolicyError(problems, what="operation")


@frozen(kw_only=True)
class Restore:
    """Bring a captured engine back.

    Attributes:
        artifact: An opened artifact.
        placement: Where; another port than the captured one is allowed.
        thaw_timeout_s: How long the process image may take to come back, s.
        answer_timeout_s: How long the restored engine may take to give its first answer, s.
    """

    artifact: ArtifactLike = field(kw_only=False)
    placement: Placement
    thaw_timeout_s: float = field(default=600.0, validator=_positive)
    answer_timeout_s: float = field(default=120.0, validator=_positive)


@frozen(kw_only=True)
class Stop:
    """End a running engine and everything it started.

    Attributes:
        engine: Its handle.
        grace_s: How long it may take to end by itself after SIGTERM, s.
    """

    engine: EngineHandle = field(kw_only=False)
    grace_s: float = 10.0


def _opened(_instance: object, _attribute: object, value: Any) -> None:
    if not isinstance(value, ArtifactLike):
        raise PolicyError(
            [("$.artifact", f"expected an opened artifact (Artifact.open), found {value!r}")], what="operation"
        )


@frozen(kw_only=True)
class Verify:
    """Find out whether an artifact is what was captured: its files, the packs it names, and their coverage.

    Attributes:
        artifact: An opened artifact.
        verify: ``evidence`` digests what has no valid evidence, ``full`` digests all; ``None``: what
            ``weights.verify`` of the policy says.
        store: The root of the store with its packs; needed when it names some.
    """

    artifact: ArtifactLike = field(kw_only=False, validator=_opened)
    verify: Literal["evidence", "full"] | None = None
    store: str | None = field(default=None, converter=_optional_absolute)

    def __attrs_post_init__(self) -> None:
        if self.verify not in ("evidence", "full", None):
            raise PolicyError([("$.verify", f"expected 'evidence' or 'full', found {self.verify!r}")], what="operation")


@frozen(kw_only=True)
class Delete:
    """Delete an artifact, and on request the packs that no other artifact names.

    Attributes:
        artifact: An opened artifact.
        store: The root of a store; packs of it that nothing else names are deleted too. ``None``: packs stay.
        roots: *Every* directory that holds artifacts or overlays of the store; given with a store, and only then.
        dry_run: Find out what would go, and touch nothing.
    """

    artifact: ArtifactLike = field(kw_only=False, validator=_opened)
    store: str | None = field(default=None, converter=_optional_absolute)
    roots: tuple[str, ...] = field(default=(), converter=_absolute_each)
    dry_run: bool = False

    def __attrs_post_init__(self) -> None:
        if (self.store is None) != (not self.roots):
            expected = "the directories that hold all artifacts of the store" if self.store else "none without a store"
            raise PolicyError(
                [("$.roots", f"expected {expected}, found {', '.join(self.roots) or 'none'}")], what="operation"
            )


@frozen(kw_only=True)
class Publish:
    """Put an artifact where other hosts find it: packs into a hub's repository, the rest into an OCI registry.

    Tokens and logins are found by the clients of hub and registry, as always; none is in a plan.

    Attributes:
        artifact: An opened artifact.
        store: The root of the store with its packs; given with a repository, and only then.
        repository: ``owner/name`` in the hub; ``None``: packs are not published.
        endpoint: Another hub than the client's own.
        create: Make the repository, private, when it does not exist.
        reference: ``registry/repository:tag``; ``None``: the artifact itself is not published.
        insecure: Speak plain HTTP with the registry.
    """

    artifact: ArtifactLike = field(kw_only=False, validator=_opened)
    store: str | None = field(default=None, converter=_optional_absolute)
    repository: str | None = None
    endpoint: str | None = None
    create: bool = False
    reference: str | None = None
    insecure: bool = False

    def __attrs_post_init__(self) -> None:
        problems = []
        if not (self.repository or self.reference):
            problems.append(("$", "expected a repository for packs, a reference for the rest, or both; found neither"))
        if bool(self.store) != bool(self.repository):
            problems.append(("$.store", "expected a store with a repository, and none without"))
        if (self.endpoint or self.create) and not self.repository:
            problems.append(("$.repository", "expected one, since endpoint or create is given"))
        if self.insecure and not self.reference:
            problems.append(("$.reference", "expected one, since insecure is given"))
        if problems:
            raise PolicyError(problems, what="operation")


Operation = Launch | Capture | Restore | Stop | Verify | Delete | Publish
