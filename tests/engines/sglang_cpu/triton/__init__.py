"""Stand-in for triton, which takes a gigabyte and compiles for GPUs: kernels can be defined, and raise when launched.

torch asks ``triton.backends.backends`` and ``triton.runtime.driver`` whether there is a GPU to compile for; no backend
and no driver is what a machine without one has.
"""

from functools import cache

from coldsnap_stand_ins import Decorator, everything_of

__version__ = "3.0.0"


class Config:
    """A choice of a kernel's parameters; modules list them while they are imported."""

    def __init__(self, kwargs=None, **options):
        self.kwargs = kwargs or {}
        self.__dict__.update(options)


class Constexpr:
    """A constant of a kernel."""

    def __init__(self, value=None):
        self.value = value


def cdiv(a, b):
    """Divide, rounding up."""
    return -(-a // b)


def next_power_of_2(n):
    """Round up to a power of two."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


@cache
def _class(name):
    """Return a class of this name: others inherit from it, or ask whether something is one."""
    return type(name, (Exception if name.endswith(("Error", "OutOfResources")) else object,), {})


def _special(name):
    if name == "driver":
        raise RuntimeError("triton.driver: there is no GPU, and this is a stand-in")
    if name in _KNOWN:
        return _KNOWN[name]
    if name in _DECORATORS:
        return Decorator(f"triton.{name}")
    return _class(name) if name == "dtype" or name[:1].isupper() else None


_DECORATORS = ("jit", "autotune", "heuristics")
_KNOWN = {
    "backends": {},
    "constexpr": Constexpr,
    "Config": Config,
    "triton_key": lambda: "stand-in",  # part of the key of what torch compiles for the processor
}

jit, autotune, heuristics = (Decorator(f"triton.{name}") for name in _DECORATORS)
__getattr__ = everything_of(
    "triton",
    _special,
    submodules=("backends", "compiler", "language", "runtime", "testing", "tools"),
    without=("knobs",),  # where SGLang would register what is to be told when a kernel is loaded
)
