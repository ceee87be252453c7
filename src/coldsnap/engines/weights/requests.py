"""What a worker's memory may be asked: the requests of ``docs/weights.md``, read strictly.

The one rule: an unknown field, a wrong type or a contradiction is refused before anything is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from attrs import field, frozen

from coldsnap.artifact import record
from coldsnap.artifact.extents import PAGE_BYTES
from coldsnap.artifact.manifest import ModelSource
from coldsnap.engines.weights.documents import Identity
from coldsnap.engines.weights.replay import Recording
from coldsnap.engines.weights.replaying import LoaderBackend, Loading
from coldsnap.transfer.backend import BackendName, Tuning
from coldsnap.transfer.capture import CaptureBackendName
from coldsnap.transfer.native import NativeLibrary

__all__ = ["HydrateRequest", "Loader", "MaterializeRequest", "ReleaseRequest", "read_request"]

Mode = Literal["direct", "buffered"]
_ABSOLUTE = record.matching(r"/[^\x00]*", "an absolute path")
_HEX = record.matching(r"[0-9a-f]{64}", "64 lowercase hex digits")


_SAMPLE = record.at_least(0, below=4097)


def _whole_pages(_: object, _field: object, value: int) -> None:
    if value % PAGE_BYTES:
        raise record.Broken("json.9", f"a size of transfers must be a multiple of {PAGE_BYTES}, found {value}")


@frozen(kw_only=True)
class _Transfer:
    """How bytes are moved.

    Attributes:
        native_library: ``io.native_library``.
        native_sha256: ``io.native_sha256``.
        queue_depth: ``io.queue_depth``.
        chunk_bytes: ``io.chunk_bytes``.
    """

    native_library: str | None = field(default=None, validator=record.optional(_ABSOLUTE))
    native_sha256: str | None = field(default=None, validator=record.optional(_HEX))
    queue_depth: int = field(default=4, validator=record.at_least(1, below=65))
    chunk_bytes: int = field(default=64 << 20, validator=[record.at_least(PAGE_BYTES), _whole_pages])

    @property
    def tuning(self) -> Tuning:
        """The same for a transfer."""
        return Tuning(queue_depth=self.queue_depth, chunk_bytes=self.chunk_bytes)


@frozen(kw_only=True)
class ReleaseRequest(_Transfer):
    """``release``.

    Attributes:
        worker: Whose memory this is.
        directory: Where residual and manifests go.
        store: Where packs are.
        capture_id: Of the artifact.
        model: The checkpoint, when known.
        discard: Regions that are given away without a copy (``process.discard``).
        backend: ``io.capture_backend``.
        write_mode: ``io.hibernate_write_mode``.
        reserve_bytes: What must stay free.
        export_model_payload: False: no pack, the residual holds everything.
        reuse_blob: ``io.reuse_blob``: look for the pack before it is written.
        recovery: Whether the copies of the load are recorded, for a recovery: off, auto (where they can be), required.
        derived_buffer_max_bytes: ``weights.recovery.derived_buffer_max_bytes``.
        verify_model_bytes: ``weights.recovery.verify_model_bytes``: sampled now, compared after a recovery.
    """

    worker: str
    directory: str = field(validator=_ABSOLUTE)
    store: str = field(validator=_ABSOLUTE)
    capture_id: str
    model: ModelSource | None = None
    discard: tuple[str, ...] = ("kv_cache",)
    backend: CaptureBackendName = "auto"
    write_mode: Mode = "direct"
    reserve_bytes: int = field(default=1 << 30, validator=record.at_least(0))
    export_model_payload: bool = True
    reuse_blob: bool = True
    recovery: Literal["off", "auto", "required"] = "auto"
    derived_buffer_max_bytes: int = field(default=64 << 20, validator=record.at_least(0, below=(1 << 30) + 1))
    verify_model_bytes: int = field(default=0, validator=_SAMPLE)

    @property
    def recording(self) -> Recording:
        """Whether a recovery is to be possible."""
        return Recording(wanted=self.recovery, derived_max_bytes=self.derived_buffer_max_bytes)

    @property
    def identity(self) -> Identity:
        """Whose memory, and of which capture."""
        return Identity(worker=self.worker, capture_id=self.capture_id, model=self.model)

    @property
    def capture_backend(self) -> CaptureBackendName:
        """The backend, with the mode in it: a mode of its own has only what is not chosen by name."""
        return "buffered" if self.backend == "auto" and self.write_mode == "buffered" else self.backend


@frozen(kw_only=True)
class Loader:
    """How a checkpoint is read.

    Attributes:
        backend: ``weights.recovery.loader_backend``.
        chunk_bytes: ``weights.recovery.chunk_bytes``.
        staging_bytes: ``weights.recovery.staging_bytes``.
        queue_depth: ``weights.recovery.queue_depth``.
        verify_bytes: ``weights.recovery.verify_bytes``.
        verify_model_bytes: ``weights.recovery.verify_model_bytes``; as many as the release has sampled.
    """

    backend: LoaderBackend = "auto"
    chunk_bytes: int = field(default=64 << 20, validator=[record.at_least(PAGE_BYTES), _whole_pages])
    staging_bytes: int = field(default=256 << 20, validator=[record.at_least(PAGE_BYTES), _whole_pages])
    queue_depth: int = field(default=4, validator=record.at_least(1, below=65))
    verify_bytes: int = field(default=0, validator=_SAMPLE)
    verify_model_bytes: int = field(default=0, validator=_SAMPLE)

    @property
    def needs_library(self) -> bool:
        """Whether it reads with the native library."""
        return self.backend in ("auto", "direct", "buffered")

    def loading(self, library: NativeLibrary | None) -> Loading:
        """Return the same for a replay."""
        return Loading(
            library=library if self.needs_library else None,
            backend=self.backend,
            tuning=Tuning(queue_depth=self.queue_depth, chunk_bytes=self.chunk_bytes),
            staging_bytes=self.staging_bytes,
            verify_bytes=self.verify_bytes,
        )


@frozen(kw_only=True)
class HydrateRequest(_Transfer):
    """``hydrate``; without arguments: of the generation that was released last, as it was written.

    Attributes:
        tags: What to bring: ``weights`` and the discarded regions; None: all that is asleep.
        provider: Who brings the weights: native (the pack) or recovery (the checkpoint).
        directory: Where residual and manifests are; None: where they were written.
        pack: The pack; None with a directory: the residual holds everything.
        manifest_sha256: Digest of the native manifest; comes with a directory.
        recovery_sha256: Digest of the recovery manifest; a recovery needs it with a directory.
        loader: How a recovery reads the checkpoint.
        backend: ``io.hydration_backend``; None: python if the release was told to, else auto.
        read_mode: ``io.hibernate_read_mode``.
        verify_mode: ``io.verify_mode``.
        verify: ``weights.verify``; none: the caller admits the pack before he accepts an answer.
    """

    tags: tuple[str, ...] | None = None
    provider: Literal["native", "recovery"] = "native"
    directory: str | None = field(default=None, validator=record.optional(_ABSOLUTE))
    pack: str | None = field(default=None, validator=record.optional(_ABSOLUTE))
    manifest_sha256: str | None = field(default=None, validator=record.optional(record.sha256))
    recovery_sha256: str | None = field(default=None, validator=record.optional(record.sha256))
    loader: Loader = field(factory=Loader)
    backend: BackendName | None = None
    read_mode: Mode = "direct"
    verify_mode: Literal["inline", "preverified"] = "inline"
    verify: Literal["evidence", "full", "none"] = "evidence"

    def __attrs_post_init__(self) -> None:
        """Check that a generation is named completely."""
        if (self.directory is None) != (self.manifest_sha256 is None) or (self.pack and not self.directory):
            raise record.Broken("json.6", "directory and manifest_sha256 come together, a pack with both")
        if self.verify == "none" and self.verify_mode == "preverified":
            raise record.Broken("json.9", "verify none goes with verify_mode inline: something must look at the bytes")
        if self.provider == "recovery" and (self.directory is None) != (self.recovery_sha256 is None):
            raise record.Broken("json.6", "directory and recovery_sha256 come together in a recovery")

    @property
    def compared_bytes(self) -> int:
        """How many bytes at both ends of every tensor are compared afterwards."""
        return self.loader.verify_model_bytes if self.provider == "recovery" else 0

    def hydration_backend(self, default: BackendName) -> BackendName:
        """Return the backend, with the mode in it."""
        backend = self.backend or default
        return "buffered" if backend == "auto" and self.read_mode == "buffered" else backend

    @property
    def place(self) -> tuple[Path, Path | None, str] | None:
        """Directory, pack and digest, when they were given."""
        if self.directory is None or self.manifest_sha256 is None:
            return None
        return Path(self.directory), None if self.pack is None else Path(self.pack), self.manifest_sha256


@frozen(kw_only=True)
class MaterializeRequest:
    """``materialize``: write the pack of a generation out of memory that is awake (docs/materialize.md).

    Attributes:
        worker: Whose memory this is.
        directory: Where its native manifest is.
        manifest_sha256: Digest of the native manifest.
        store: Where the pack goes.
        wait_s: How long the reply may wait for the pack, s.
        reserve_bytes: What must stay free in the store.
        native_library: ``io.native_library``; None: the packaged one, where the installation has it.
        native_sha256: ``io.native_sha256``.
    """

    worker: str
    directory: str = field(validator=_ABSOLUTE)
    manifest_sha256: str = field(validator=record.sha256)
    store: str = field(validator=_ABSOLUTE)
    wait_s: float = 0.0
    reserve_bytes: int = field(default=1 << 30, validator=record.at_least(0))
    native_library: str | None = field(default=None, validator=record.optional(_ABSOLUTE))
    native_sha256: str | None = field(default=None, validator=record.optional(_HEX))


_T = TypeVar("_T")


def read_request(cls: type[_T], request: Mapping[str, Any]) -> _T:
    """Read one request; null is as good as absent.

    Raises:
        FormatError: A field is unknown, missing or wrong.
    """
    given = {name: value for name, value in request.items() if name not in ("op", "timeout_s") and value is not None}
    return record.read(cls, given, path=f"the request {request.get('op', cls.__name__)}")
