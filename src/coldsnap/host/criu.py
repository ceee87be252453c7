"""Find a CRIU executable and say exactly which build it is.

The one rule: an executable that was named is never replaced by another, and the identity covers every library it
loads. Hashing and ``criu check`` take a tenth of a second, so their outcome is kept for as long as nothing they depend
on has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from coldsnap.errors import FormatError
from coldsnap.host import private
from coldsnap.host.child import ChildError, last_lines, output
from coldsnap.host.contracts import MINIMUM_CRIU_VERSION
from coldsnap.host.facts import CriuFacts, PrivilegeFacts
from coldsnap.host.record import digest, from_plain, to_plain

TOOL_CACHE = Path("~/.cache/coldsnap-ci")
SYSTEM_DIRECTORIES = "/usr/local/sbin:/usr/sbin:/sbin"
CACHE = "criu.json"
CACHE_ENTRIES = 16
TIMEOUT_S = 30.0


def candidates(criu: str | os.PathLike[str] | None, tools: Path | None = None) -> Iterator[tuple[Path, str]]:
    """Yield executables in the order of preference, each with how it was found.

    Args:
        criu: The user's choice; then nothing else is looked at.
        tools: Directory in which ``tools/get_criu.py`` installs.
    """
    if criu is not None:
        yield Path(os.path.abspath(os.path.expanduser(criu))), "argument"
        return
    for search in (None, SYSTEM_DIRECTORIES):
        if found := shutil.which("criu", path=search):
            yield Path(found).resolve(), "PATH"
    cache = (tools or TOOL_CACHE).expanduser()
    complete = [mark.parent / "criu" for mark in cache.glob("criu-*/.complete")]
    for path in sorted(complete, key=lambda each: each.stat().st_mtime_ns, reverse=True):
        yield path, "tool cache"


def find_criu(
    criu: str | os.PathLike[str] | None,
    *,
    boot_id: str,
    privileges: PrivilegeFacts,
    cache: Path | None = None,
    tools: Path | None = None,
) -> CriuFacts | None:
    """Return the first candidate that is new enough and passes its check; else the first of all, with what is wrong.

    Args:
        criu: The user's choice.
        boot_id: This boot; a check holds for one kernel.
        privileges: The caller's; a check holds for them.
        cache: Directory of the private records.
        tools: Directory in which ``tools/get_criu.py`` installs.
    """
    first: CriuFacts | None = None
    kept = private.read(CACHE, cache)
    for path, found in candidates(criu, tools):
        facts = _known(path, found, kept, digest([boot_id, to_plain(privileges)]), cache)
        if facts.check_ok and facts.version >= MINIMUM_CRIU_VERSION:
            return facts
        first = first or facts
    return first


def _known(path: Path, found: str, kept: dict[str, Any], conditions: str, cache: Path | None) -> CriuFacts:
    entry = kept.get(str(path))
    if isinstance(entry, dict) and entry.get("conditions") == conditions and _unchanged(entry.get("files")):
        try:
            facts: CriuFacts = from_plain(CriuFacts, entry.get("facts"), CACHE)
        except FormatError:
            pass
        else:
            return evolve(facts, found=found)
    facts, files = examine(path, found)
    if files:
        kept.pop(str(path), None)
        kept[str(path)] = {"conditions": conditions, "files": _stamps(files), "facts": to_plain(facts)}
        # A home that cannot be written costs the next probe a tenth of a second, nothing else.
        with contextlib.suppress(OSError):
            private.write(CACHE, dict(list(kept.items())[-CACHE_ENTRIES:]), cache)
    return facts


def _stamps(files: Sequence[Path]) -> dict[str, list[int]]:
    stats = ((path, path.stat()) for path in files)
    return {
        str(path): [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for path, stat in stats
    }


def _unchanged(files: object) -> bool:
    try:
        return isinstance(files, dict) and bool(files) and files == _stamps([Path(name) for name in files])
    except OSError:
        return False


def examine(path: Path, found: str) -> tuple[CriuFacts, tuple[Path, ...]]:
    """Run and hash an executable.

    Returns:
        The facts, and every file they depend on; no file when the executable cannot be used at all.
    """
    try:
        executable = _sha256(path)
        _require_elf(path)
        version = _version(path)
        paths = _libraries(path)
    except (OSError, ChildError) as error:
        return _unusable(path, found, str(error)), ()
    libraries = {name: _sha256(library) for name, library in paths.items()}
    packaged = _packaged_digest(path, executable, libraries)
    identity = {"version": ".".join(map(str, version)), "executable": packaged, "libraries": libraries}
    ok, message = _check(path)
    facts = CriuFacts(
        path=str(path),
        version=version,
        sha256=executable,
        libraries=libraries,
        build_digest=digest(identity),
        check_ok=ok,
        check_message=message,
        found=found,
    )
    beside = path.with_name("criu.json")
    return facts, (path, *paths.values(), *((beside,) if beside.exists() else ()))


def _unusable(path: Path, found: str, why: str) -> CriuFacts:
    return CriuFacts(
        path=str(path),
        version=(),
        sha256="",
        libraries={},
        build_digest="",
        check_ok=False,
        check_message=why,
        found=found,
    )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_elf(path: Path) -> None:
    with open(path, "rb") as file:
        if file.read(4) != b"\x7fELF":
            # A script's digest would not change with the CRIU behind it.
            raise ChildError(f"{path} is no ELF executable; name the executable that the script runs")


def _version(path: Path) -> tuple[int, ...]:
    match = re.search(r"Version: (\d+(?:\.\d+)*)", output([str(path), "--version"], timeout_s=TIMEOUT_S))
    if match is None:
        raise ChildError(f"{path} does not say a version, so it is no CRIU")
    return tuple(int(part) for part in match[1].split("."))


def _libraries(path: Path) -> dict[str, Path]:
    """Ask the executable's own loader what it would load (ld.so(8)); a static executable loads nothing."""
    text = output([str(path), "--version"], timeout_s=TIMEOUT_S, env={"LD_TRACE_LOADED_OBJECTS": "1"})
    found = re.findall(r"^\s+(?:\S+ => )?(/\S+) \(0x", text, re.MULTILINE)
    return {Path(name).name: Path(name) for name in found}


def _packaged_digest(path: Path, executable: str, libraries: dict[str, str]) -> str:
    """Return the digest of the executable before an installer gave it its loader, when the installer's record fits.

    The loader's path lies inside the file, so one build has another digest in every directory.
    """
    try:
        record = json.loads(path.with_name("criu.json").read_text())
    except (OSError, ValueError):
        return executable
    fits = isinstance(record, dict) and record.get("sha256") == executable and record.get("libraries") == libraries
    return str(record["packaged_sha256"]) if fits and "packaged_sha256" in record else executable


def _check(path: Path) -> tuple[bool, str]:
    try:
        text = output([str(path), "check"], timeout_s=TIMEOUT_S)
    except ChildError as error:
        return False, str(error)
    return True, last_lines(text, 1)
