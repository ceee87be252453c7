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


class Submodule(types.ModuleType):
    """A submodule in which every name is found; ``special`` has those that need to be something in particular."""

    special = types.MappingProxyType({})

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if (found := self.special.get(name)) is not None:
            return found(name)
        return Absent(f"{self.__name__}.{name}")


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


def everything_of(package, special=types.MappingProxyType({}), submodules=(), without=()):
    """Return the ``__getattr__`` of a package in which every name, and every submodule, is found.

    Args:
        package: Its name.
        special: Names that are not simply absent: what makes each of its own name.
        submodules: Names that are modules although nobody imported them.
        without: Submodules that older versions lack, and that nobody needs.
    """
    sys.meta_path.append(Submodules(package, special, without))

    def find(name):
        if name.startswith("__") or name in without:
            raise AttributeError(name)
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        if name in special:
            return special[name](name)
        return Absent(f"{package}.{name}")

    return find
