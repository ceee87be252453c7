"""Acting on a module when the process imports it, and not before.

The engine core of a vLLM whose workers are processes of their own never imports the worker's module; importing it for
the sake of a hook would cost every such process seconds and hundreds of megabytes.

The one rule: a hook runs once, after the module has been executed and before anyone else can use it; what it raises
fails the import.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["after_import"]

Hook = Callable[[ModuleType], None]


def after_import(name: str, hook: Hook) -> None:
    """Call ``hook`` with a module: now when it is imported already, else as soon as it is.

    Args:
        name: Full name of the module.
        hook: Called with the module.
    """
    module = sys.modules.get(name)
    if module is not None:
        hook(module)
        return
    sys.meta_path.insert(0, _Watch(name, hook))


class _Watch(MetaPathFinder):
    """Finds one module, by asking everyone else."""

    def __init__(self, name: str, hook: Hook) -> None:
        self._name = name
        self._hook = hook

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002  the finder protocol has them
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return the module's own specification, with a loader that calls the hook after it."""
        if fullname != self._name:
            return None
        # Out of the way first: the search below asks all finders again.
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
            return None
        spec.loader = _Loader(spec.loader, self._hook)
        return spec


class _Loader(Loader):
    """A module's own loader, then the hook."""

    def __init__(self, loader: Loader, hook: Hook) -> None:
        self._loader = loader
        self._hook = hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Make the module as its own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then call the hook."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._hook(module)
