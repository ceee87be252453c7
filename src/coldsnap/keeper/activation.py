"""The activation runtime: what runs beside and inside an engine's ranks, as a tree that is used by its path.

It is this package with its native library and its entry points. An engine that is started finds it first on its search
path, at a place that never changes; what is there, the run directory of each keeper says by a link. So a fix reaches
every engine that is started from a template, and no template is captured again.

The one rule: what runs is what was staged. The tree is read-only, verified when it is placed, and nobody writes
compiled code into it.
"""

from __future__ import annotations

import importlib.metadata
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import coldsnap
from coldsnap.artifact.tree import Tree, Trees
from coldsnap.errors import AdmissionError

__all__ = ["ACTIVATION", "MODEL", "activation_environment", "activation_files", "finds_activation", "place"]

ACTIVATION = "activation"
MODEL = "model"
"""Names beside the directive: of the activation runtime, and of the files that an engine starts with."""

_METADATA = ("METADATA", "entry_points.txt")
_SKIPPED = {"__pycache__"}


def activation_files() -> dict[str, bytes]:
    """Read the package that runs here, as an engine's ranks need it.

    Returns:
        Contents by name, as they lie on a search path.

    Raises:
        AdmissionError: The package is not installed, so that it has no entry points to be found by.
    """
    try:
        distribution = importlib.metadata.distribution("coldsnap")
    except importlib.metadata.PackageNotFoundError:
        raise AdmissionError("coldsnap is not installed here, so that engines would not find its plugin") from None
    files = {
        f"coldsnap-{distribution.version}.dist-info/{name}": text.encode()
        for name in _METADATA
        if (text := distribution.read_text(name)) is not None
    }
    for package in coldsnap.__path__:  # an editable installation has its native library in a place of its own
        root = Path(package)
        for path in sorted(root.rglob("*")):
            inside = path.relative_to(root)
            if path.is_file() and not _SKIPPED & set(inside.parts):
                files.setdefault(f"coldsnap/{inside.as_posix()}", path.read_bytes())
    return files


def place(rank_dir: str | os.PathLike[str], name: str, trees: Trees, sha256: str) -> Tree:
    """Let the engines of a run directory find a tree, once it is verified; what they found before is replaced.

    Args:
        rank_dir: Where the directive lies.
        name: ``ACTIVATION`` or ``MODEL``.
        trees: The trees of a store.
        sha256: Which of them.

    Raises:
        IntegrityError: It is not what its archive says.
    """
    tree = trees.verify(sha256)
    temporary = os.path.join(rank_dir, f".{name}.{secrets.token_hex(8)}")
    os.symlink(tree.path, temporary)
    os.replace(temporary, os.path.join(rank_dir, name))
    return tree


def activation_environment(environ: Mapping[str, str], tree_dir: str) -> dict[str, str]:
    """Return an engine's environment with the activation runtime first on its search path.

    Args:
        environ: The environment.
        tree_dir: Where the processes see the directory of the directive.
    """
    path = f"{tree_dir}/{ACTIVATION}"
    others = [one for one in environ.get("PYTHONPATH", "").split(os.pathsep) if one and one != path]
    # Whoever is root may write where nobody may: an interpreter would leave compiled code in the tree.
    return {**environ, "PYTHONPATH": os.pathsep.join([path, *others]), "PYTHONDONTWRITEBYTECODE": "1"}


def finds_activation(environ: Mapping[str, str]) -> bool:
    """Tell whether an engine with this environment would find an activation runtime that is placed."""
    return any(os.path.basename(one) == ACTIVATION for one in environ.get("PYTHONPATH", "").split(os.pathsep))
