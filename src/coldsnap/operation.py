"""What is to be done: operations and where they take place. Frozen data; nothing here acts.

An operation names an engine or an artifact, and a placement. ``resolve`` turns it into a plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from attrs import field, frozen

from coldsnap.errors import PolicyError
from coldsnap.placement import Placement, UnitPlacement, absolute, absolute_each, local, optional_absolute
from coldsnap.subjects import ArtifactLike, EngineHandle, EngineSpec, handle, handle_or_opened, opened, positive

__all__ = [
    "ArtifactLike",
    "Capture",
    "Delete",
    "EngineHandle",
    "EngineSpec",
    "Launch",
    "Materialize",
    "Operation",
    "Placement",
    "Prepare",
    "Publish",
    "Restore",
    "Sleep",
    "Status",
    "Stop",
    "UnitPlacement",
    "Verify",
    "Wake",
    "local",
]

DEFAULT_PROMPT = "Reply with exactly: coldsnap"
DEFAULT_ANSWER_TOKENS = 16


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
    ready_timeout_s: float = field(default=1800.0, validator=positive)


@frozen(kw_only=True)
class Capture:
    """Capture an engine into an artifact.

    Attributes:
        engine: What to launch, or the handle of an engine that has been serving since it was launched.
        output: The artifact's directory; it must not exist.
        placement: Where to launch; not given with a handle.
        store: The root of the store that gets the packs of weights outside the image. ``None``: the store that was
            probed, else the directory ``store`` beside the output.
        then: What becomes of the workload after the commit: ``stop`` (default) or ``keep``.
        prompt: The prompt of the acceptance request.
        answer_tokens: How many tokens of the answer are compared, 1 to 512.
        ready_timeout_s: How long a launched engine may take to answer, s.
        quiesce_timeout_s: How long requests in flight may take to end, s.
        dump_timeout_s: How long the dump may take, s.
    """

    engine: EngineSpec | EngineHandle = field(kw_only=False)
    output: str = field(converter=absolute)
    placement: Placement | None = None
    store: str | None = field(default=None, converter=optional_absolute)
    then: Literal["stop", "keep"] = "stop"
    prompt: str = DEFAULT_PROMPT
    answer_tokens: int = DEFAULT_ANSWER_TOKENS
    ready_timeout_s: float = field(default=1800.0, validator=positive)
    quiesce_timeout_s: float = field(default=60.0, validator=positive)
    dump_timeout_s: float = field(default=600.0, validator=positive)

    def __attrs_post_init__(self) -> None:
        problems = []
        if isinstance(self.engine, EngineHandle) == (self.placement is not None):
            expected = (
                "no placement with the handle of a running engine" if self.placement else "a placement for the launch"
            )
            problems.append(("$.placement", f"expected {expected}"))
        if self.then not in ("stop", "keep"):
            problems.append(("$.then", f"expected 'stop' or 'keep', found {self.then!r}"))
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
        artifact: An opened artifact, or the handle of a warm engine that is to run.
        placement: Where; another port than the captured one is allowed. Not given with a handle.
        state: ``running``, or ``warm``: the processes are back and quiet, weights and KV cache are not in memory yet.
        store: The root of the store that has the packs of weights outside the image. ``None``: the store that was
            probed, else the directory ``store`` beside the artifact.
        thaw_timeout_s: How long the process image may take to come back, s.
        answer_timeout_s: How long the restored engine may take to give its first answer, s.
        ready_timeout_s: How long an engine that is started out of a template may take to be ready, s.
    """

    artifact: ArtifactLike | EngineHandle = field(kw_only=False)
    placement: Placement | None = None
    state: Literal["running", "warm"] = "running"
    store: str | None = field(default=None, converter=optional_absolute)
    thaw_timeout_s: float = field(default=600.0, validator=positive)
    answer_timeout_s: float = field(default=120.0, validator=positive)
    ready_timeout_s: float = field(default=1800.0, validator=positive)

    def __attrs_post_init__(self) -> None:
        problems = []
        warm = isinstance(self.artifact, EngineHandle)
        if warm == (self.placement is not None):
            expected = "no placement with the handle of a warm engine" if warm else "a placement for the artifact"
            problems.append(("$.placement", f"expected {expected}"))
        if self.state not in ("running", "warm") or (warm and self.state == "warm"):
            expected = "'running'" if warm else "'running' or 'warm'"
            problems.append(("$.state", f"expected {expected}, found {self.state!r}"))
        if problems:
            raise PolicyError(problems, what="operation")


@frozen(kw_only=True)
class Prepare:
    """Do what a restore would do first, and activate nothing: fetch, admit, verify, read ahead. Safe to repeat.

    Attributes:
        artifact: An opened artifact.
        placement: Where it will be restored.
        store: As of a restore; packs that are fetched go there.
        endpoint: Another hub than the client's own, for packs that are fetched.
    """

    artifact: ArtifactLike = field(kw_only=False, validator=opened)
    placement: Placement
    store: str | None = field(default=None, converter=optional_absolute)
    endpoint: str | None = None


@frozen(kw_only=True)
class Stop:
    """End a running engine and everything it started.

    Attributes:
        engine: Its handle.
        grace_s: How long it may take to end by itself after SIGTERM, s.
    """

    engine: EngineHandle = field(kw_only=False)
    grace_s: float = 10.0


TAGS = ("weights", "kv_cache")


@frozen(kw_only=True)
class Sleep:
    """Let a serving engine give its memory away: weights into files, the KV cache nowhere. Requests wait at its door.

    An engine that sleeps already sleeps on.

    Attributes:
        engine: Its handle.
        store: The root of the store that gets the packs. ``None``: the store that was probed, else one in the
            engine's run directory, which ends with the engine.
        quiesce_timeout_s: How long requests in flight may take to end, s.
        timeout_s: How long writing may take, s.
    """

    engine: EngineHandle = field(kw_only=False, validator=handle)
    store: str | None = field(default=None, converter=optional_absolute)
    quiesce_timeout_s: float = field(default=60.0, validator=positive)
    timeout_s: float = field(default=600.0, validator=positive)


def _optional_texts(value: Iterable[str] | None) -> tuple[str, ...] | None:
    # A text is a sequence of texts too: each letter of it would be a tag.
    return None if value is None else (value,) if isinstance(value, str) else tuple(value)


def _tags(_instance: object, _attribute: object, value: tuple[str, ...] | None) -> None:
    if value is not None and (not value or not set(value) <= set(TAGS) or len(set(value)) != len(value)):
        raise PolicyError([("$.tags", f"expected some of {', '.join(TAGS)}, found {value}")], what="operation")


@frozen(kw_only=True)
class Wake:
    """Bring the memory of a sleeping engine back; once all of it is there, requests are let in again.

    An engine that is awake stays so.

    Attributes:
        engine: Its handle.
        tags: ``weights`` or ``kv_cache`` alone; ``None``: both.
        timeout_s: How long it may take, s.
    """

    engine: EngineHandle = field(kw_only=False, validator=handle)
    tags: tuple[str, ...] | None = field(default=None, converter=_optional_texts, validator=_tags)
    timeout_s: float = field(default=600.0, validator=positive)


@frozen(kw_only=True)
class Status:
    """Ask a living engine how it is: awake or asleep, its memory by region, its requests.

    Attributes:
        engine: Its handle.
        timeout_s: How long its ranks may take to answer, s.
    """

    engine: EngineHandle = field(kw_only=False, validator=handle)
    timeout_s: float = field(default=10.0, validator=positive)


@frozen(kw_only=True)
class Verify:
    """Find out whether an artifact is what was captured: its files, the packs it names, and their coverage.

    Attributes:
        artifact: An opened artifact.
        verify: ``evidence`` digests what has no valid evidence, ``full`` digests all; ``None``: what
            ``weights.verify`` of the policy says.
        store: The root of the store with its packs; needed when it names some.
    """

    artifact: ArtifactLike = field(kw_only=False, validator=opened)
    verify: Literal["evidence", "full"] | None = None
    store: str | None = field(default=None, converter=optional_absolute)

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

    artifact: ArtifactLike = field(kw_only=False, validator=opened)
    store: str | None = field(default=None, converter=optional_absolute)
    roots: tuple[str, ...] = field(default=(), converter=absolute_each)
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

    artifact: ArtifactLike = field(kw_only=False, validator=opened)
    store: str | None = field(default=None, converter=optional_absolute)
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


@frozen(kw_only=True)
class Materialize:
    """Give the store the packs of an artifact again: out of the memory of an engine, or out of the checkpoint.

    Packs that are there are admitted and not written.

    Attributes:
        subject: The handle of an engine that was restored from the artifact, which serves meanwhile; or the opened
            artifact, whose pinned checkpoint is read then.
        store: The root of the store that gets the packs. ``None``: the store that was probed, else the directory
            ``store`` beside the artifact.
        wait: Whether to wait for the packs of an engine; ``Status`` tells how they are doing otherwise.
        timeout_s: How long an engine's writing may take when it is waited for, s; it goes on after that.
    """

    subject: EngineHandle | ArtifactLike = field(kw_only=False, validator=handle_or_opened)
    store: str | None = field(default=None, converter=optional_absolute)
    wait: bool = True
    timeout_s: float = field(default=1800.0, validator=positive)

    def __attrs_post_init__(self) -> None:
        if not self.wait and not isinstance(self.subject, EngineHandle):
            expected = "expected True with an artifact, since nobody goes on when the caller has ended"
            raise PolicyError([("$.wait", expected)], what="operation")


Operation = (
    Launch | Capture | Restore | Prepare | Stop | Sleep | Wake | Status | Materialize | Verify | Delete | Publish
)
