"""Every exception of the library.

::

    ColdSnapError
    ├── PolicyError (ValueError)        .problems: every ($.path, message), all at once
    ├── FileReadError (OSError)         a file that the caller named cannot be read; .path
    │   └── FileMissingError (FileNotFoundError)
    ├── AdmissionError                  valid, but not here; .mismatches: every difference, in words
    │   ├── CompatibilityError          the artifact was made for another machine, engine or driver
    │   ├── UnsupportedError            this library cannot do it (yet); .field .works
    │   └── ContractError               an engine lacks what a hook needs; .missing
    ├── ArtifactError                   bytes at rest
    │   ├── FormatError                 .path .rule
    │   ├── CoverageError               .at
    │   ├── IntegrityError              .path .expected .actual
    │   └── PayloadMissingError         .digest
    ├── NativeError                     the native library: absent, wrong digest or ABI, I/O status; .status
    ├── StepError                       a step of a plan failed; .step .rank .report
    │   ├── DriverError                 CRIU or the CUDA driver; .command .log_tail
    │   ├── EngineError                 the engine died or never answered; .log_tail
    │   ├── AcceptanceError             it answered, but not the captured answer; .expected .actual
    │   └── StepTimeout (TimeoutError)  .seconds
    └── RankErrors (ExceptionGroup)     several ranks failed at one barrier

The one rule: an exception has attributes for programs and one sentence for people, which says what, where, expected,
found, and what to do. All of them pickle, so that they cross process boundaries unharmed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from coldsnap.receipts import Report

__all__ = [
    "AcceptanceError",
    "AdmissionError",
    "ArtifactError",
    "ColdSnapError",
    "CompatibilityError",
    "ContractError",
    "CoverageError",
    "DriverError",
    "EngineError",
    "FileMissingError",
    "FileReadError",
    "FormatError",
    "IntegrityError",
    "NativeError",
    "PayloadMissingError",
    "PolicyError",
    "RankErrors",
    "StepError",
    "StepTimeout",
    "UnsupportedError",
]


def _revive(cls: type[ColdSnapError], args: tuple[Any, ...], state: dict[str, Any]) -> ColdSnapError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ColdSnapError(Exception):
    """Anything this library raises on purpose.

    Keyword arguments become attributes. ``str(error)`` is the sentence.
    """

    def __init__(self, message: str, **attributes: Any) -> None:
        super().__init__(message)
        self.__dict__.update(attributes)

    def __reduce__(self) -> tuple[Any, ...]:
        # The default protocol would call the constructor with ``args`` alone and lose keyword attributes.
        return _revive, (type(self), self.args, self.__dict__)


def _listing(message: str, lines: Sequence[str]) -> str:
    return message if not lines else "\n".join([message, *(f"  - {line}" for line in lines)])


class PolicyError(ColdSnapError, ValueError):
    """A policy (or another text the user wrote) is not valid.

    Attributes:
        problems: Every problem found, as ``(path, message)``; paths start with ``$``.
    """

    problems: tuple[tuple[str, str], ...]

    def __init__(self, problems: Sequence[tuple[str, str]], *, what: str = "policy") -> None:
        self.problems = tuple((str(path), str(message)) for path, message in problems)
        lines = [f"{path}: {message}" for path, message in self.problems]
        super().__init__(_listing(f"the {what} has {len(lines)} problem{'s' * (len(lines) != 1)}:", lines))


class FileReadError(ColdSnapError, OSError):
    """A file that the caller named (a policy, facts) cannot be read.

    Attributes:
        path: The file.
    """

    path: str

    def __init__(self, message: str, *, path: str, number: int | None = None) -> None:
        super().__init__(message, path=path)
        self.errno = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive_unread, (type(self), str(self), self.path, self.errno)

    @classmethod
    def of(cls, error: OSError, path: str, what: str) -> FileReadError:
        """Return what to raise in place of the kernel's error, of the class that says whether the file is missing.

        Args:
            error: The kernel's.
            path: The file.
            what: What it was to hold, in words.
        """
        if isinstance(error, FileNotFoundError):
            sentence = f"there is no {what} at {path}; correct the path, or make one there with save()"
            return FileMissingError(sentence, path=path, number=error.errno)
        return cls(f"the {what} {path} cannot be read: {error.strerror}", path=path, number=error.errno)


def _revive_unread(cls: type[FileReadError], message: str, path: str, number: int | None) -> FileReadError:
    return cls(message, path=path, number=number)


class FileMissingError(FileReadError, FileNotFoundError):
    """A file that the caller named is not there."""


class AdmissionError(ColdSnapError):
    """The request is valid, but not on these machines or not now. Nothing was started.

    Attributes:
        mismatches: Every reason at once, one sentence each; names, never secret values.
    """

    mismatches: tuple[str, ...]

    def __init__(self, message: str, mismatches: Sequence[str] = (), **attributes: Any) -> None:
        self.mismatches = tuple(mismatches)
        super().__init__(_listing(message, self.mismatches), **attributes)


class CompatibilityError(AdmissionError):
    """The artifact was captured on something that this machine, engine or environment is not."""


class UnsupportedError(AdmissionError):
    """The library cannot do what was asked, by design or not yet.

    Attributes:
        field: The policy leaf or argument concerned, for example ``weights.mode``.
        works: What works instead, as a sentence or a list of values.
    """

    field: str
    works: str

    def __init__(self, message: str, *, field: str, works: str, mismatches: Sequence[str] = ()) -> None:
        super().__init__(f"{message} ({field}). What works: {works}", mismatches, field=field, works=works)


class ContractError(AdmissionError):
    """An engine does not have the structure that a hook relies on.

    Attributes:
        missing: Each object or parameter that was not as expected.
    """

    missing: tuple[str, ...]

    def __init__(self, message: str, missing: Sequence[str] = ()) -> None:
        super().__init__(message, missing, missing=tuple(missing))


class ArtifactError(ColdSnapError):
    """An artifact, pack or record at rest cannot be used."""


class FormatError(ArtifactError):
    """A file breaks a rule of its format document.

    Attributes:
        path: The file, and inside it the place.
        rule: The rule's number in ``docs/format``, for example ``descriptor.3``.
    """

    path: str
    rule: str

    def __init__(self, message: str, *, path: str, rule: str) -> None:
        super().__init__(f"{path}: {message} (rule {rule})", path=path, rule=rule)


class CoverageError(ArtifactError):
    """Model and residual extents do not cover every byte of every preserved allocation exactly once.

    Attributes:
        at: ``(allocation, offset, kind)``, kind one of gap, overlap, duplicate, size.
    """

    at: tuple[str, int, str]

    def __init__(self, message: str, *, at: tuple[str, int, str]) -> None:
        super().__init__(message, at=at)


class IntegrityError(ArtifactError):
    """Bytes at rest are not the bytes that were captured.

    Attributes:
        path: The file.
        expected: Digest or size recorded at capture.
        actual: Digest or size found.
    """

    path: str
    expected: str
    actual: str

    def __init__(self, message: str, *, path: str, expected: str, actual: str) -> None:
        sentence = f"{path}: {message}: expected {expected}, found {actual}; copy the artifact again or capture anew"
        super().__init__(sentence, path=path, expected=expected, actual=actual)


class PayloadMissingError(ArtifactError):
    """A weight pack that the artifact refers to is not in the store.

    Attributes:
        digest: ``sha256:<hex>`` of the pack.
    """

    digest: str

    def __init__(self, message: str, *, digest: str) -> None:
        super().__init__(message, digest=digest)


class NativeError(ColdSnapError):
    """The native I/O library is absent, not the expected one, or reports an I/O failure.

    Attributes:
        status: The library's status code, 0 when it was never called.
    """

    status: int

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message, status=status)


class StepError(ColdSnapError):
    """A step of a plan failed.

    Attributes:
        step: The id of the step, ``None`` when raised outside a plan.
        rank: The rank concerned, when one rank alone failed.
        report: The report of the plan so far, with its timeline; set by ``execute``.
    """

    step: str | None = None
    rank: int | None = None
    report: Report | None = None


class DriverError(StepError):
    """CRIU or the CUDA driver refused.

    Attributes:
        command: What was asked.
        log_tail: The last lines of its log.
    """

    command: str
    log_tail: str

    def __init__(self, message: str, *, command: str = "", log_tail: str = "", **attributes: Any) -> None:
        text = message if not log_tail else f"{message}\n{log_tail}"
        super().__init__(text, command=command, log_tail=log_tail, **attributes)


class EngineError(StepError):
    """The engine died, or did not do what was asked in time.

    Attributes:
        log_tail: The last lines of the engine's log.
    """

    log_tail: str

    def __init__(self, message: str, *, log_tail: str = "", **attributes: Any) -> None:
        text = message if not log_tail else f"{message}\nlast lines of its log:\n{log_tail}"
        super().__init__(text, log_tail=log_tail, **attributes)


class AcceptanceError(StepError):
    """The restored engine answers, but not what it answered at capture.

    Attributes:
        expected: The answer recorded at capture.
        actual: The answer now.
    """

    expected: str
    actual: str

    def __init__(self, message: str, *, expected: str, actual: str) -> None:
        super().__init__(f"{message}: expected {expected}, got {actual}", expected=expected, actual=actual)


class StepTimeout(StepError, TimeoutError):
    """A step did not end within its deadline.

    Attributes:
        seconds: The deadline, s.
    """

    seconds: float

    def __init__(self, message: str, *, seconds: float, **attributes: Any) -> None:
        super().__init__(message, seconds=seconds, **attributes)


class RankErrors(ColdSnapError, ExceptionGroup[Exception]):
    """Several ranks failed at one barrier; ``.exceptions`` has one exception for each."""

    def __new__(cls, message: str, exceptions: Sequence[Exception]) -> Self:
        """Build the group; the constructor of exception groups takes part in ``__new__``."""
        return super().__new__(cls, message, exceptions)

    def __init__(self, message: str, exceptions: Sequence[Exception]) -> None:
        ExceptionGroup.__init__(self, message, exceptions)

    def __reduce__(self) -> tuple[Any, ...]:
        return RankErrors, (self.message, list(self.exceptions))

    def derive(self, excs: Sequence[Exception]) -> RankErrors:  # type: ignore[override]
        """Keep the type when Python splits the group."""
        return RankErrors(self.message, excs)
