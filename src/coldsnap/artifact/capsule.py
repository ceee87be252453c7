"""One unit's driver-qualified part of an artifact: what CRIU wrote, and what a thaw needs besides.

The one rule: whatever a thaw needs to know is here or in the files listed here; nothing is guessed from the images.
"""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen

from coldsnap.artifact import record

__all__ = [
    "CacheSeed",
    "Capsule",
    "CapsuleUnit",
    "Criu",
    "CriuOptions",
    "FileRecord",
    "Listener",
    "LogFile",
    "Pages",
    "VolatileFile",
]

UNIT = record.matching(r"[a-z0-9][a-z0-9._-]{0,63}", "1 to 64 of a-z 0-9 . _ -")
WORKER = record.matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "1 to 64 of A-Z a-z 0-9 . _ -")


@frozen(kw_only=True)
class FileRecord:
    """One file of the artifact.

    Attributes:
        path: Relative to the artifact's directory.
        bytes: Size.
        sha256: ``sha256:<hex>`` of the content.
        mode: Permission bits; 0o600 for everything this version writes.
        mtime_ns: Modification time to give back, ns; only where it matters (cache seeds).
    """

    path: str = field(validator=record.relative_path)
    bytes: int = field(validator=record.at_least(0))
    sha256: str = field(validator=record.sha256)
    mode: int = field(default=0o600, validator=record.at_least(0))
    mtime_ns: int | None = None


@frozen(kw_only=True)
class CriuOptions:
    """The options of the dump that a restore must repeat."""

    link_remap: bool = False
    tcp_established: bool = False
    tcp_close: bool = False
    file_locks: bool = False
    shell_job: bool = False
    ext_unix_sk: bool = False
    ghost_limit_bytes: int = field(default=1 << 20, validator=record.at_least(0))
    network_lock: Literal["skip", "nftables", "iptables"] = "skip"


@frozen(kw_only=True)
class Criu:
    """The build that made the images.

    Attributes:
        version: For example ``4.2.1``.
        sha256: Digest of the executable.
        options: What a restore must repeat.
    """

    version: str = field(validator=record.matching(r"\d+(\.\d+){0,3}([-+.][0-9A-Za-z.+-]+)?", "a version"))
    sha256: str = field(validator=record.sha256)
    options: CriuOptions = CriuOptions()


@frozen(kw_only=True)
class Listener:
    """A TCP socket that a process of the tree listens on.

    Attributes:
        address: As captured.
        port: As captured.
        role: ``api`` (what users talk to), ``control`` or ``internal``.
    """

    address: str
    port: int = field(validator=record.at_least(1))
    role: Literal["api", "control", "internal"] = "internal"


@frozen(kw_only=True)
class VolatileFile:
    """A file of the tree's private tmpfs (``/dev/shm``, ``TMPDIR``): CRIU refers to it by path and does not keep it.

    Attributes:
        target: Absolute path inside the tree.
        path: The saved copy, relative to the artifact's directory; None for a directory or an empty sparse file.
        bytes: Size in the tree; the copy may be sparse.
        mode: Permission bits in the tree.
        uid: Owner in the tree.
        gid: Group in the tree.
        kind: ``file`` or ``directory``.
    """

    target: str = field(validator=record.matching(r"/[^\x00]+", "an absolute path"))
    path: str | None = None
    bytes: int = field(default=0, validator=record.at_least(0))
    mode: int = field(default=0o600, validator=record.at_least(0))
    uid: int = field(default=0, validator=record.at_least(0))
    gid: int = field(default=0, validator=record.at_least(0))
    kind: Literal["file", "directory"] = "file"


@frozen(kw_only=True)
class LogFile:
    """A file outside the capsule that the tree had open and may have grown since.

    Attributes:
        target: Absolute path inside the tree.
        bytes: Size at the dump, which CRIU compares.
        append: Opened O_APPEND, where CRIU does not compare.
    """

    target: str = field(validator=record.matching(r"/[^\x00]+", "an absolute path"))
    bytes: int = field(validator=record.at_least(0))
    append: bool = False


@frozen(kw_only=True)
class Pages:
    """How the memory of the processes is stored.

    Attributes:
        compression: none: CRIU's own files of pages; lz4: page images (``docs/format/pageimage.md``) in their place.
        raw_bytes: What CRIU wrote; 0: not told.
        zero_bytes: Of them zero pages that were left out.
        stored_bytes: What the files take.
    """

    compression: Literal["none", "lz4"] = "none"
    raw_bytes: int = field(default=0, validator=record.at_least(0))
    zero_bytes: int = field(default=0, validator=record.at_least(0))
    stored_bytes: int = field(default=0, validator=record.at_least(0))


@frozen(kw_only=True)
class CapsuleUnit:
    """One unit's process tree at rest.

    Attributes:
        unit: Name.
        path: Its directory, relative to the artifact's; ``files`` lists exactly what is below.
        images: Directory of the CRIU images, relative to the artifact's.
        criu: The build and its options.
        root_pid: Of the tree, in its namespace.
        pids: Every pid of the tree, in its namespace, ascending.
        listeners: TCP listeners.
        volatile: What to put back on the private tmpfs before a thaw; empty where the driver keeps an index of its own
            beside the images, as n610 does.
        logs: Recorded sizes; empty where the driver makes logs anew, as n610 does.
        namespace: ``private`` (pid, mount, ipc) or ``host``.
        run_dir: The run directory as the tree sees it.
        pages: How the memory of the processes is stored.
        files: Every file of the capsule.
    """

    unit: str = field(validator=UNIT)
    path: str = field(validator=record.relative_path)
    images: str = field(validator=record.relative_path)
    criu: Criu
    root_pid: int = field(validator=record.at_least(1))
    pids: tuple[int, ...]
    listeners: tuple[Listener, ...] = ()
    volatile: tuple[VolatileFile, ...] = field(
        default=(), validator=record.one_of_each(lambda file: file.target, "target")
    )
    logs: tuple[LogFile, ...] = ()
    namespace: Literal["private", "host"]
    run_dir: str = field(validator=record.matching(r"/[^\x00]+", "an absolute path"))
    pages: Pages = Pages()
    files: tuple[FileRecord, ...] = field(validator=record.one_of_each(lambda file: file.path, "file"))

    def __attrs_post_init__(self) -> None:
        """Check descriptor.4: files and images lie inside the unit's directory, and the root is one of the pids."""
        prefix = f"{self.path}/"
        outside = [file.path for file in self.files if not file.path.startswith(prefix)]
        if outside or not f"{self.images}/".startswith(prefix):
            raise record.Broken("descriptor.4", f"{(*outside, self.images)[0]!r} lies outside {self.path!r}")
        if self.root_pid not in self.pids:
            raise record.Broken(
                "descriptor.4", f"the root pid {self.root_pid} is not among the pids of unit {self.unit}"
            )
        listed = {file.path for file in self.files}
        for file in self.volatile:
            if file.path is not None and file.path not in listed:
                raise record.Broken(
                    "descriptor.4", f"the saved copy {file.path!r} of {file.target!r} is not a listed file"
                )


@frozen(kw_only=True)
class Capsule:
    """Every unit's process tree at rest."""

    units: tuple[CapsuleUnit, ...] = field(validator=record.one_of_each(lambda unit: unit.unit, "unit"))


@frozen(kw_only=True)
class CacheSeed:
    """Files of a derived cache (compiled kernels, startup plans) that an engine finds warm at its next start.

    Attributes:
        unit: Whose.
        name: Which of its caches.
        target: The directory inside the tree, absolute.
        path: Its copy, relative to the artifact's directory.
        files: Every file of it, with its mtime: compilers compare mtimes, so they are given back.
    """

    unit: str = field(validator=UNIT)
    name: str = field(validator=UNIT)
    target: str = field(validator=record.matching(r"/[^\x00]+", "an absolute path"))
    path: str = field(validator=record.relative_path)
    files: tuple[FileRecord, ...] = field(validator=record.one_of_each(lambda file: file.path, "file"))

    def __attrs_post_init__(self) -> None:
        """Check manifest.9: the files lie inside the seed's directory and carry their mtimes."""
        for file in self.files:
            if not file.path.startswith(f"{self.path}/") or file.mtime_ns is None:
                raise record.Broken("manifest.9", f"the cache file {file.path!r} is outside or has no mtime")
