"""What an engine's interpreter has installed, and whether that is still so.

At capture one short process describes the interpreter; at restore the recorded directories are listed again, which
takes a millisecond and starts nothing.

The one rule: an engine is started only where the plugin inside it is this very code, byte for byte; the two sides of a
capture never have to guess what the other means.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from attrs import evolve, field, frozen

import coldsnap
from coldsnap.artifact import record
from coldsnap.engines import environment_probe
from coldsnap.errors import AdmissionError, FormatError

__all__ = [
    "EngineEnvironment",
    "Site",
    "environment_still_is",
    "inspect_environment",
    "own_code_digest",
    "require_interpreter",
]


@frozen(kw_only=True)
class Site:
    """A directory of ``sys.path`` that holds installed distributions.

    Attributes:
        path: The directory.
        distributions: The names of their records, for example ``torch-2.13.0+cpu.dist-info``.
    """

    path: str
    distributions: tuple[str, ...] = field(repr=False)


@frozen(kw_only=True)
class EngineEnvironment:
    """What an engine's interpreter has installed.

    Attributes:
        executable: The interpreter, links resolved.
        python_version: For example ``3.11.2``.
        python_abi: The tag of its extension modules.
        versions: Of the distributions that were asked for and are there.
        packages: Directories of the packages that were asked for, empty where there is none.
        coldsnap_digest: Over every Python file of its coldsnap.
        entry_points: ``group:name=object`` of every entry point into coldsnap.
        sites: Where distributions are installed.
    """

    executable: str
    python_version: str
    python_abi: str
    versions: Mapping[str, str]
    packages: Mapping[str, str]
    coldsnap_digest: str
    entry_points: tuple[str, ...]
    sites: tuple[Site, ...]

    def differences(self, other: EngineEnvironment) -> tuple[str, ...]:
        """Return in words how another environment differs in the versions that were asked for."""
        found = [
            f"{name}: captured {getattr(self, name)}, found {getattr(other, name)}"
            for name in ("python_version", "python_abi")
            if getattr(self, name) != getattr(other, name)
        ]
        for name in sorted({*self.versions, *other.versions}):
            captured, present = (one.versions.get(name, "none") for one in (self, other))
            if captured != present:
                found.append(f"{name}: captured {captured}, found {present}")
        return tuple(found)


@cache
def own_code_digest() -> str:
    """Return the digest of the coldsnap that runs here."""
    return environment_probe.code_digest(os.path.dirname(coldsnap.__file__))


def require_interpreter(python: str) -> None:
    """Refuse an interpreter that is plainly not there; nothing is started.

    Raises:
        AdmissionError: There is no such executable file.
    """
    if shutil.which(python) is None:
        raise AdmissionError(f"the engine's interpreter {python} cannot be started: there is no such executable file")


def inspect_environment(
    python: str,
    *,
    engine: Sequence[str],
    others: Sequence[str] = (),
    entry_point: str | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: str | None = None,
    timeout_s: float = 30.0,
) -> EngineEnvironment:
    """Describe an interpreter and demand that it holds this very coldsnap.

    Args:
        python: The interpreter.
        engine: The names under which the engine is distributed, the usual one first; one must be installed, and its
            version is told under the usual name.
        others: Further distributions whose versions are wanted.
        entry_point: ``group:name`` through which the engine finds the plugin.
        environ: The environment of the engine; PYTHONPATH and the like decide what it finds.
        cwd: The engine's working directory.
        timeout_s: For the process, s.

    Raises:
        AdmissionError: The interpreter does not run, the engine is not installed, or coldsnap there is missing or
        another one.
    """
    try:
        text = Path(environment_probe.__file__).read_text()
        done = subprocess.run(
            [python, "-c", text, "coldsnap", *engine, *others],
            env=None if environ is None else dict(environ),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=True,
        )
        found = record.read(EngineEnvironment, json.loads(done.stdout), path=f"the description of {python}")
    except OSError as error:
        raise AdmissionError(f"the engine's interpreter {python} cannot be started: {error}") from error
    except subprocess.TimeoutExpired:
        raise AdmissionError(
            f"the engine's interpreter {python} did not describe itself within {timeout_s:g} s"
        ) from None
    except (subprocess.CalledProcessError, ValueError, FormatError) as error:
        detail = getattr(error, "stderr", b"")[-500:].decode(errors="replace") or str(error)
        raise AdmissionError(f"the engine's interpreter {python} cannot describe itself: {detail}") from error
    _demand_this_coldsnap(python, found, entry_point)
    return _with_engine_version(python, found, engine)


def _with_engine_version(python: str, found: EngineEnvironment, names: Sequence[str]) -> EngineEnvironment:
    version = next((found.versions[name] for name in names if name in found.versions), None)
    if version is None or not found.packages[names[0]]:
        wanted = " or ".join(names)
        raise AdmissionError(f"{python} has no distribution {wanted}; install the engine there, or name its python=")
    return evolve(found, versions={**found.versions, names[0]: version})


def _demand_this_coldsnap(python: str, found: EngineEnvironment, entry_point: str | None) -> None:
    root = Path(coldsnap.__file__).parents[2]
    source = str(root) if (root / "pyproject.toml").exists() else "coldsnap"
    remedy = f"install the same one with: {python} -m pip install --no-deps --force-reinstall {source}"
    version = found.versions.get("coldsnap")
    if not found.coldsnap_digest or version is None:
        raise AdmissionError(
            f"the engine's environment {python} has no coldsnap, which must run inside the engine; {remedy}"
        )
    if found.coldsnap_digest != own_code_digest():
        raise AdmissionError(
            f"the engine's environment {python} has another coldsnap ({version}, code {found.coldsnap_digest[:19]}) "
            f"than this process (code {own_code_digest()[:19]}); {remedy}"
        )
    if entry_point is not None and not any(point.startswith(f"{entry_point}=") for point in found.entry_points):
        raise AdmissionError(
            f"the coldsnap in {python} has no entry point {entry_point}, so the engine will not load it; {remedy}"
        )


def environment_still_is(recorded: EngineEnvironment) -> list[str]:
    """Compare what is installed now with what was recorded, without starting a process.

    coldsnap itself is left out: a restored rank keeps the code of its capture, and says with its ``plugin_abi`` what
    it speaks.

    Args:
        recorded: The description made at capture.

    Returns:
        Every difference in words; empty when nothing changed.
    """
    if not os.access(recorded.executable, os.X_OK):
        return [f"the engine's interpreter {recorded.executable} is not there any more"]
    found = []
    for site in recorded.sites:
        try:
            now = set(environment_probe.distributions(site.path))
        except OSError as error:
            found.append(f"the directory {site.path} of the engine's environment cannot be read: {error.strerror}")
            continue
        before = set(site.distributions)
        found += [f"{name} is gone from {site.path}" for name in sorted(_others(before - now))]
        found += [f"{name} is new in {site.path}" for name in sorted(_others(now - before))]
    return found


def _others(names: set[str]) -> set[str]:
    return {name for name in names if not name.startswith("coldsnap-")}
