"""What an operation is about: an engine as a user describes it, one that runs, an artifact.

The one rule: protocols only, so that whoever writes an operation down needs neither an engine nor a disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from coldsnap.errors import PolicyError

__all__ = ["ArtifactLike", "EngineHandle", "EngineSpec", "handle", "handle_or_opened", "opened", "positive"]


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

    @property
    def labels(self) -> Mapping[str, str]:
        """Return what was written down when it was launched or restored; its specification for one."""


@runtime_checkable
class ArtifactLike(Protocol):
    """A committed artifact that has been opened."""

    @property
    def path(self) -> Path:
        """Return the artifact's directory."""


def positive(_instance: object, _attribute: object, value: float) -> None:
    """Demand a positive number."""
    if not value > 0:
        name = getattr(_attribute, "name", "value")
        raise PolicyError([(f"$.{name}", f"expected a positive number, found {value}")], what="operation")


def handle(_instance: object, _attribute: object, value: Any) -> None:
    """Demand the handle of a running engine."""
    if not isinstance(value, EngineHandle):
        raise PolicyError([("$.engine", f"expected the handle of a running engine, found {value!r}")], what="operation")


def opened(_instance: object, _attribute: object, value: Any) -> None:
    """Demand an opened artifact."""
    if not isinstance(value, ArtifactLike):
        raise PolicyError(
            [("$.artifact", f"expected an opened artifact (Artifact.open), found {value!r}")], what="operation"
        )


def handle_or_opened(_instance: object, _attribute: object, value: Any) -> None:
    """Demand the handle of a running engine, or an opened artifact."""
    if not isinstance(value, EngineHandle | ArtifactLike):
        expected = "expected the handle of a running engine, or an opened artifact (Artifact.open)"
        raise PolicyError([("$.subject", f"{expected}, found {value!r}")], what="operation")
