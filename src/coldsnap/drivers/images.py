"""Image files of CRIU that this library reads or edits: files.img, pstree.img and the statistics.

The one rule: an edit changes the fields it names and nothing else. Entries are parsed with the few fields of
``criu.proto`` and written again with everything they held; a file that does not parse to its last byte is refused.

Layout (CRIU's, little endian): a common magic, the kind's magic, then for each entry its length and a protobuf message.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable
from typing import Any

from attrs import frozen

from coldsnap.drivers.messages import enum_value, message
from coldsnap.drivers.sockets import TcpSocket, to_address, to_words
from coldsnap.errors import FormatError

__all__ = [
    "COMMON_MAGIC",
    "DumpStats",
    "FilesImage",
    "RegularFile",
    "join_messages",
    "parse_entry",
    "read_claims",
    "read_entries",
    "read_messages",
    "read_pids",
    "read_stats",
]

COMMON_MAGIC, SERVICE_MAGIC = 0x54564319, 0x55105940
KINDS = {
    "files.img": (COMMON_MAGIC, 0x56303138, "file_entry"),
    "remap-fpath.img": (COMMON_MAGIC, 0x59133954, "remap_file_path_entry"),
    "pstree.img": (COMMON_MAGIC, 0x50273030, "pstree_entry"),
    "stats-dump": (SERVICE_MAGIC, 0x57093306, "stats_entry"),
    "stats-restore": (SERVICE_MAGIC, 0x57093306, "stats_entry"),
}
HEADER = struct.Struct("<II")
LENGTH = struct.Struct("<I")
MAX_IMAGE_BYTES = 256 << 20

IPPROTO_TCP = 6


@frozen(kw_only=True)
class RegularFile:
    """An open or mapped file of the image.

    Attributes:
        path: Absolute, in the tree's mount namespace.
        size_bytes: As recorded; ``None`` when CRIU will not compare it (opened to append).
        writable: Whether it is open for writing.
    """

    path: str
    size_bytes: int | None
    writable: bool


@frozen(kw_only=True)
class DumpStats:
    """What CRIU measured.

    Attributes:
        freezing_s: Until every process stood still, s.
        frozen_s: How long they stood still, s.
        pages_written: Pages in the image.
    """

    freezing_s: float
    frozen_s: float
    pages_written: int


def _read(directory_fd: int, name: str) -> bytes:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory_fd)
    except OSError as error:
        raise FormatError(f"it cannot be opened: {error.strerror}", path=name, rule="image.1") from error
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_size > MAX_IMAGE_BYTES:
            raise FormatError(f"it is larger than {MAX_IMAGE_BYTES} bytes", path=name, rule="image.1")
        return file.read()


def _exists(directory_fd: int, name: str) -> bool:
    return name in os.listdir(directory_fd)


def read_entries(directory_fd: int, name: str) -> list[Any]:
    """Read every entry of an image file.

    Args:
        directory_fd: The directory of images.
        name: One of the names in ``KINDS``.

    Returns:
        Messages of the kind's class.

    Raises:
        FormatError: Rules image.1 to image.3 of ``docs/drivers.md``.
    """
    common, magic, entry = KINDS[name]
    return [parse_entry(entry, data, name) for data in read_messages(directory_fd, name, (common, magic))]


def read_messages(directory_fd: int, name: str, magic: tuple[int, int]) -> list[bytes]:
    """Read every entry of an image file without parsing it.

    Args:
        directory_fd: The directory of images.
        name: The file.
        magic: The two numbers that it starts with.

    Raises:
        FormatError: Rules image.1 to image.3 of ``docs/drivers.md``.
    """
    data = _read(directory_fd, name)
    if len(data) < HEADER.size or HEADER.unpack_from(data) != magic:
        raise FormatError("its magic numbers are not those of this kind of image", path=name, rule="image.2")
    entries, at = [], HEADER.size
    while at < len(data):
        if at + LENGTH.size > len(data):
            raise FormatError(f"it ends inside an entry, at byte {at}", path=name, rule="image.3")
        (size,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size
        if at + size > len(data):
            raise FormatError(f"it ends inside an entry, at byte {at}", path=name, rule="image.3")
        entries.append(data[at : at + size])
        at += size
    return entries


def parse_entry(entry: str, data: bytes, name: str) -> Any:
    """Parse one entry.

    Args:
        entry: Its message.
        data: As read.
        name: The file, for errors.

    Raises:
        FormatError: Rule image.3.
    """
    from google.protobuf.message import DecodeError  # noqa: PLC0415  (protobuf loads with the first message)

    parsed = message(entry)()
    try:
        parsed.ParseFromString(data)
    except DecodeError as error:
        raise FormatError(f"an entry is not a {entry}", path=name, rule="image.3") from error
    return parsed


def encode_entries(name: str, entries: Iterable[Any]) -> bytes:
    """Return the bytes of an image file with these entries."""
    common, magic, _ = KINDS[name]
    return join_messages((common, magic), (entry.SerializeToString() for entry in entries))


def join_messages(magic: tuple[int, int], messages: Iterable[bytes]) -> bytes:
    """Return the bytes of an image file with these entries."""
    parts = [HEADER.pack(*magic)]
    for data in messages:
        parts += [LENGTH.pack(len(data)), data]
    return b"".join(parts)


class FilesImage:
    """files.img: every file, socket and pipe that some process of the tree holds.

    Attributes:
        edited: Whether it differs from what was read.
    """

    NAME = "files.img"

    def __init__(self, entries: list[Any], remapped: frozenset[int]) -> None:
        self._entries, self._remapped = entries, remapped
        self.edited = False
        self._regular = enum_value("fd_types", "REG")
        self._inet = enum_value("fd_types", "INETSK")
        self._unix = enum_value("fd_types", "UNIXSK")

    @classmethod
    def read(cls, directory_fd: int) -> FilesImage:
        """Read it from a directory of images.

        Raises:
            FormatError: See :func:`read_entries`.
        """
        remaps = read_entries(directory_fd, "remap-fpath.img") if _exists(directory_fd, "remap-fpath.img") else []
        return cls(read_entries(directory_fd, cls.NAME), frozenset(remap.orig_id for remap in remaps))

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        return encode_entries(self.NAME, self._entries)

    def _inet_entries(self) -> list[Any]:
        return [entry.isk for entry in self._entries if entry.type == self._inet and entry.isk.proto == IPPROTO_TCP]

    def tcp_sockets(self) -> tuple[TcpSocket, ...]:
        """Return the TCP sockets that are bound or connected."""
        return tuple(
            TcpSocket(
                inode=isk.ino,
                state=isk.state,
                address=to_address(isk.src_addr),
                port=isk.src_port,
                peer_address=to_address(isk.dst_addr),
                peer_port=isk.dst_port,
                only_v6=isk.v6only,
            )
            for isk in self._inet_entries()
            if isk.src_port
        )

    def move_socket(self, moved: TcpSocket) -> None:
        """Give the socket with that inode other addresses and ports."""
        for isk in self._inet_entries():
            if isk.ino == moved.inode:
                self.edited = True
                isk.src_port, isk.dst_port = moved.port, moved.peer_port
                isk.src_addr[:], isk.dst_addr[:] = to_words(moved.address), to_words(moved.peer_address)

    def unix_names(self) -> tuple[bytes, ...]:
        """Return the names that Unix sockets are bound to: absolute paths, or abstract names behind a NUL."""
        names = []
        for entry in self._entries:
            if entry.type == self._unix and entry.usk.name:
                name = bytes(entry.usk.name).rstrip(b"\0") if entry.usk.name[0] else bytes(entry.usk.name)
                above = b"" if name[0] in b"\0/" else os.fsencode(entry.usk.name_dir) + b"/"
                names.append(above + name)
        return tuple(dict.fromkeys(names))

    def regular_files(self) -> tuple[RegularFile, ...]:
        """Return the regular files that must be there before a restore, link_remap files among them."""
        return tuple(
            RegularFile(
                path=f"/{reg.name.lstrip('/')}",
                size_bytes=reg.size if reg.HasField("size") else None,
                writable=reg.flags & os.O_ACCMODE != os.O_RDONLY,
            )
            for reg in self._regular_entries()
            # A link_remap file has no mode in the image.
            if (stat.S_ISREG(reg.mode) or not reg.HasField("mode")) and reg.id not in self._remapped
        )

    def _regular_entries(self) -> list[Any]:
        return [entry.reg for entry in self._entries if entry.type == self._regular]

    def forget_sizes(self, paths: Iterable[str]) -> None:
        """Drop the recorded sizes of these files, so that CRIU does not compare them."""
        wanted = set(paths)
        for reg in self._regular_entries():
            if f"/{reg.name.lstrip('/')}" in wanted:
                self.edited |= reg.HasField("size")
                reg.ClearField("size")


def read_pids(directory_fd: int) -> tuple[int, ...]:
    """Return the pid of every process, the root first.

    Args:
        directory_fd: The directory of images.
    """
    return tuple(entry.pid for entry in read_entries(directory_fd, "pstree.img"))


def read_claims(directory_fd: int) -> tuple[int, ...]:
    """Return every pid and thread id that a restore will claim: threads draw from the same numbers.

    Args:
        directory_fd: The directory of images.
    """
    claims: dict[int, None] = {}
    for entry in read_entries(directory_fd, "pstree.img"):
        claims |= dict.fromkeys((entry.pid, *entry.threads))
    return tuple(claims)


def read_stats(work_fd: int) -> DumpStats | None:
    """Return what CRIU measured during a dump; ``None`` when it left no statistics.

    Args:
        work_fd: The directory it worked in.
    """
    try:
        dump = read_entries(work_fd, "stats-dump")[0].dump
    except (FormatError, IndexError):
        return None
    return DumpStats(
        freezing_s=dump.freezing_time / 1e6,
        frozen_s=dump.frozen_time / 1e6,
        pages_written=dump.pages_written + dump.shpages_written,
    )
