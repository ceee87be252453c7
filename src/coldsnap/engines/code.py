"""Whether the files that an engine is made of are still those of a capture.

A template reads its interpreter and its engine when it is started, so a file that was changed since would run. The one
rule: contents decide; sizes and times only spare the reading where nothing was touched.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from attrs import field, frozen

from coldsnap.artifact import canonical, record
from coldsnap.artifact.cores import in_threads
from coldsnap.artifact.hashing import sha256_fd
from coldsnap.artifact.private import read_small

__all__ = ["TEMPLATE", "KnownFiles", "TemplateFiles", "changed", "known", "read_template_files"]

TEMPLATE = "template.json"
"""The file of a capsule that says what a template was taken from."""

MAX_BYTES = 1 << 20
_SOURCE = (".py",)
_LEFT_OUT = ("__pycache__",)


@frozen(kw_only=True)
class KnownFiles:
    """A file, or the code in a directory, as it was.

    Attributes:
        path: Of the file or the directory.
        sha256: Over names, sizes, and the contents of what is no extension module.
        looks: Over names, sizes and times of modification.
    """

    path: str
    sha256: str = field(validator=record.sha256)
    looks: str = field(validator=record.sha256)


@frozen(kw_only=True)
class TemplateFiles:
    """``template.json`` of a capsule.

    Attributes:
        stop: Where the template stopped.
        files: Interpreter and engine.
    """

    format: Literal[1] = 1
    kind: Literal["coldsnap-template-files"] = "coldsnap-template-files"
    stop: Literal["pre_exec", "imported"]
    files: tuple[KnownFiles, ...]

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        return canonical.encode(record.write(self))


def read_template_files(directory: Path) -> TemplateFiles:
    """Read ``template.json`` of a capsule.

    Raises:
        FormatError: It breaks a rule.
        IntegrityError: It is not there.
    """
    path = directory / TEMPLATE
    value = canonical.decode(read_small(path, max_bytes=MAX_BYTES), path=str(path), max_bytes=MAX_BYTES)
    return record.read(TemplateFiles, value, path=str(path))


def known(paths: Sequence[str]) -> tuple[KnownFiles, ...]:
    """Describe files and directories.

    Args:
        paths: A directory stands for the code below it: of ``.py`` files the contents count, of ``.so`` the size.

    Raises:
        OSError: One cannot be read.
    """
    return tuple(KnownFiles(path=path, sha256=_contents(path), looks=_looks(path)) for path in paths)


def changed(recorded: Sequence[KnownFiles]) -> list[str]:
    """Return in words what is not as it was; empty when nothing changed."""
    found = []
    for one in recorded:
        try:
            if _looks(one.path) != one.looks and _contents(one.path) != one.sha256:
                found.append(f"{one.path} was changed since the capture: put it back, or capture anew")
        except OSError as error:
            found.append(f"{one.path} cannot be read: {error.strerror}")
    return found


def _files(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files that count, by name, each with what a look tells of it."""
    if not os.path.isdir(path):
        yield "", os.stat(path)
        return
    waiting = [""]
    while waiting:
        directory = waiting.pop()
        with os.scandir(os.path.join(path, directory)) as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                name = os.path.join(directory, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    waiting += [] if entry.name in _LEFT_OUT else [name]
                elif entry.name.endswith((*_SOURCE, ".so")):
                    yield name, entry.stat()


def _looks(path: str) -> str:
    state = hashlib.sha256()
    for name, status in _files(path):
        state.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return f"sha256:{state.hexdigest()}"


def _contents(path: str) -> str:
    files = list(_files(path))
    digests = in_threads(lambda item: _digest(path, *item), files)
    state = hashlib.sha256()
    for (name, status), digest in zip(files, digests, strict=True):
        state.update(f"{name}\0{status.st_size}\0{digest}\n".encode())
    return f"sha256:{state.hexdigest()}"


def _digest(path: str, name: str, status: os.stat_result) -> str:
    if name and not name.endswith(_SOURCE):
        return ""  # extension modules are large; another build of one comes with another distribution, or another size
    fd = os.open(os.path.join(path, name) if name else path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return sha256_fd(fd, status.st_size)
    finally:
        os.close(fd)
