"""What a directive says to a template that is to go on: where it is placed, and what its load reads.

The one rule: a start moves an engine and feeds it; it cannot name another command, nor any name of the environment that
is not on a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from attrs import field, frozen

from coldsnap.artifact import record
from coldsnap.artifact.capsule import UNIT, WORKER
from coldsnap.artifact.manifest import ModelSource

__all__ = ["Checkpoint", "Export", "Hydration", "Loader", "Phase", "Start", "WorkerSource"]

Phase: TypeAlias = Literal["pre_exec", "imported"]


@frozen(kw_only=True)
class Start:
    """Lets a template go on.

    Attributes:
        unit: Its unit.
        phase: Where it stopped.
        load_format: What the engine is told to load with; absent: what its command says.
        environment: Names of this placement (``RUNTIME_NAMES``); those not here are removed at a restore.
        transport: Name of the file with the names of the network, beside the directive; absent at a launch.
    """

    unit: str = field(validator=UNIT)
    phase: Phase
    load_format: Literal["coldsnap"] | None = None
    environment: Mapping[str, str] = field(factory=dict)
    transport: Literal["transport.json"] | None = None


@frozen(kw_only=True)
class WorkerSource:
    """Where one worker finds its weights.

    Attributes:
        worker: Its name, as in the artifact.
        directory: Of its manifests and residual, absolute.
        manifest_sha256: Digest of the native manifest there.
        pack: Path of its pack; absent with the provider recovery.
        index_sha256: Digest of the bootstrap index there, for an engine that is started anew.
        recovery_sha256: Digest of the recovery manifest there, with the provider recovery.
    """

    worker: str = field(validator=WORKER)
    directory: str = field(validator=record.matching(r"/.*", "an absolute path"))
    manifest_sha256: str = field(validator=record.sha256)
    pack: str | None = field(default=None, validator=record.optional(record.matching(r"/.*", "an absolute path")))
    index_sha256: str | None = field(default=None, validator=record.optional(record.sha256))
    recovery_sha256: str | None = field(default=None, validator=record.optional(record.sha256))


@frozen(kw_only=True)
class Loader:
    """How a recovery reads the checkpoint; the names are those of ``loader`` of ``hydrate``.

    Attributes:
        backend: Of the loader.
        chunk_bytes: Size of a read.
        staging_bytes: Largest slab of what cannot go straight to its place.
        queue_depth: Reads in flight.
        verify_bytes: How much of both ends of each tensor is compared with the file.
    """

    backend: Literal["auto", "direct", "buffered", "mmap", "torch"]
    chunk_bytes: int = field(validator=record.at_least(4096))
    staging_bytes: int = field(validator=record.at_least(4096))
    queue_depth: int = field(validator=record.at_least(1))
    verify_bytes: int = field(validator=record.at_least(0))


@frozen(kw_only=True)
class Hydration:
    """How the load of a started engine reads; the names are those of ``hydrate`` on the control socket.

    Attributes:
        backend: Of the transfer.
        read_mode: direct or buffered.
        verify_mode: inline or preverified.
        verify: How a pack is admitted.
        queue_depth: Reads in flight.
        chunk_bytes: Size of one.
        native_library: A library that was chosen.
        native_sha256: Its digest.
        loader: How the checkpoint is read, with the provider recovery.
        workers: One for each worker.
    """

    backend: str
    read_mode: Literal["direct", "buffered"]
    verify_mode: Literal["inline", "preverified"]
    verify: Literal["evidence", "full", "none"]
    queue_depth: int = field(validator=record.at_least(1))
    chunk_bytes: int = field(validator=record.at_least(4096))
    native_library: str | None = None
    native_sha256: str | None = None
    loader: Loader | None = None
    workers: tuple[WorkerSource, ...] = field(validator=record.one_of_each(lambda item: item.worker, "worker"))

    def request(self, worker: str) -> dict[str, Any]:
        """Return what one worker reads, as the arguments of ``hydrate``.

        Raises:
            KeyError: The directive says nothing of this worker.
        """
        for one in self.workers:
            if one.worker == worker:
                shared, own = record.write_object(self), record.write_object(one)
                return {name: value for name, value in {**shared, **own}.items() if name not in ("workers", "worker")}
        raise KeyError(worker)


@frozen(kw_only=True)
class Export:
    """What a load leaves behind once it has ended, for a fresh start; the names are those of ``release``.

    Attributes:
        directory: Has one directory for each worker, absolute.
        store: Where packs are.
        capture_id: Of the artifact.
        model: The checkpoint, when known.
        backend: Of the residual.
        write_mode: direct or buffered.
        reuse_blob: Look for the pack before it is written.
        reserve_bytes: What must stay free.
        queue_depth: Writes in flight.
        chunk_bytes: Size of one.
        native_library: A library that was chosen.
        native_sha256: Its digest.
        recovery: Whether the copies of the load are recorded: off, auto (where they can be), required.
        derived_buffer_max_bytes: How much of parameters and buffers may be no copy of the checkpoint.
    """

    directory: str = field(validator=record.matching(r"/.*", "an absolute path"))
    store: str = field(validator=record.matching(r"/.*", "an absolute path"))
    capture_id: str
    model: ModelSource | None = None
    backend: str = "auto"
    write_mode: Literal["direct", "buffered"] = "direct"
    reuse_blob: bool = True
    reserve_bytes: int = field(default=1 << 30, validator=record.at_least(0))
    queue_depth: int = field(default=4, validator=record.at_least(1))
    chunk_bytes: int = field(default=64 << 20, validator=record.at_least(4096))
    native_library: str | None = None
    native_sha256: str | None = None
    recovery: Literal["off", "auto", "required"] = "auto"
    derived_buffer_max_bytes: int = field(default=64 << 20, validator=record.at_least(0))

    def request(self, worker: str) -> dict[str, Any]:
        """Return what one worker writes, as the arguments of ``release``."""
        return {**record.write_object(self), "worker": worker, "directory": f"{self.directory}/{worker}", "discard": []}


@frozen(kw_only=True)
class Checkpoint:
    """Where the load format ``coldsnap`` finds a checkpoint that is not the directory the engine was started with.

    Attributes:
        path: A directory with safetensors, absolute.
        load_format: The engine's own load format that reads it.
    """

    path: str = field(validator=record.matching(r"/.*", "an absolute path"))
    load_format: str = "auto"
