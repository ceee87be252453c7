"""Names of packages that cannot run without a GPU: there to be imported, never to be used.

The one rule: importing works, running says which kernel was missing. A test can never pass by a kernel that does
nothing.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types


class Absent:
    """Something of a package that is not here; so is everything of it, and what it makes of others while importing.

    ``@absent(option=1)`` above a function, ``absent[grid]``, ``class C(absent)`` and ``absent | None`` are fine: all of
    that happens while modules are imported. A function that was decorated, and one that was looked up, raise when
    called.
    """

    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self.__name__} was called, and there is no GPU here: a stand-in has its name only")

    def __getitem__(self, _):
        return self

    def __mro_entries__(self, _):
        return (object,)

    def __or__(self, _):
        return self

    __ror__ = __or__

    def __iter__(self):
        return iter(())

    def __bool__(self):
        return False

    def __eq__(self, other):
        return isinstance(other, Absent) and other.__name__ == self.__name__

    def __hash__(self):
        return hash(self.__name__)


class Kernel(Absent):
    """A function of which a kernel would have been compiled."""

    def __init__(self, function):
        super().__init__(f"{function.__module__}.{function.__name__}")
        self.fn, self.__doc__, self.__module__ = function, function.__doc__, function.__module__


class Decorator(Absent):
    """What turns functions into kernels, with arguments or without."""

    def __call__(self, function=None, **_):
        if isinstance(function, Kernel):
            return function
        return Kernel(function) if isinstance(function, types.FunctionType) else self


def nothing_special(_):
    """Say of a name that it need not be anything in particular."""


class Submodule(types.ModuleType):
    """A submodule in which every name is found; ``special`` returns what some need to be in particular."""

    special = staticmethod(nothing_special)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = self.special(name)
        return Absent(f"{self.__name__}.{name}") if found is None else found


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of one package, at any depth."""

    def __init__(self, package, special, without):
        self.prefix, self.special, self.without = f"{package}.", special, {f"{package}.{name}" for name in without}

    def find_spec(self, name, path=None, target=None):
        if name.startswith(self.prefix) and name not in self.without:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = Submodule(spec.name)
        module.special = self.special
        return module

    def exec_module(self, module):
        pass


def everything_of(package, special=nothing_special, submodules=(), without=()):
    """Return the ``__getattr__`` of a package in which every name, and every submodule, is found.

    Args:
        package: Its name.
        special: Returns what a name is, and None of one that is simply absent.
        submodules: Names that are modules although nobody imported them.
        without: Submodules that older versions lack, and that nobody needs.
    """
    sys.meta_path.append(Submodules(package, special, without))

    def find(name):
        if name.startswith("__") or name in without:
            raise AttributeError(name)
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        found = special(name)
        return Absent(f"{package}.{name}") if found is None else found

    return find
