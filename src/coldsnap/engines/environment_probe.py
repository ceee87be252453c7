"""Describe the interpreter that runs this file, as one JSON object on stdout.

The one rule: it is sent to engines' interpreters as text, so it uses the standard library alone and imports no engine:
a description must not take the seconds that an import takes.

    python -c "$(cat environment_probe.py)" vllm torch …      # distributions whose version is wanted
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import sysconfig


def code_digest(package: str) -> str:
    """Return ``sha256:<hex>`` over every Python file of a package, by relative path."""
    state = hashlib.sha256()
    for directory, subdirectories, names in os.walk(package):
        subdirectories.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                path = os.path.join(directory, name)
                with open(path, "rb") as file:
                    contents = hashlib.sha256(file.read()).digest()
                state.update(os.path.relpath(path, package).encode() + b"\0" + contents)
    return f"sha256:{state.hexdigest()}"


def package_directory(name: str) -> str:
    """Return where a top-level package lies, without importing it; empty when there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return ""
    return os.path.dirname(spec.origin) if spec is not None and spec.origin else ""


def versions(names: list[str]) -> dict[str, str]:
    """Return the versions of those distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def distributions(directory: str) -> list[str]:
    """Return the names of the distribution records of one directory."""
    return sorted(name for name in os.listdir(directory) if name.endswith((".dist-info", ".egg-info", ".egg-link")))


def describe(names: list[str]) -> dict[str, object]:
    """Return everything that is told about this interpreter."""
    own = package_directory("coldsnap")
    directories = dict.fromkeys(os.path.realpath(entry) for entry in sys.path if entry and os.path.isdir(entry))
    return {
        "executable": os.path.realpath(sys.executable),
        "python_version": sys.version.split()[0],
        "python_abi": sysconfig.get_config_var("SOABI") or "",
        "versions": versions(names),
        "packages": {name: package_directory(name.replace("-", "_")) for name in names},
        "coldsnap_digest": code_digest(own) if own else "",
        "entry_points": sorted(
            f"{point.group}:{point.name}={point.value}"
            for distribution in importlib.metadata.distributions(name="coldsnap")
            for point in distribution.entry_points
        ),
        "sites": [
            {"path": directory, "distributions": found}
            for directory in directories
            if (found := distributions(directory))
        ],
    }


if __name__ == "__main__":
    json.dump(describe(sys.argv[1:]), sys.stdout)
