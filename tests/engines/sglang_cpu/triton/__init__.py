"""Stand-in for triton, which takes a gigabyte and compiles for GPUs: kernels can be defined, and raise when launched.

torch asks ``triton.backends.backends`` and ``triton.runtime.driver`` whether there is a GPU to compile for; no backend
and no driver is what a machine without one has.
"""

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


def _no_driver(name):
    raise RuntimeError(f"triton.{name}: there is no GPU, and this is a stand-in")


_SPECIAL = {
    "backends": lambda _: {},
    "driver": _no_driver,
    "constexpr": lambda _: Constexpr,
    "Config": lambda _: Config,
    **{name: lambda name: Decorator(f"triton.{name}") for name in ("jit", "autotune", "heuristics")},
}
# A class that others inherit from or compare with must be one.
_SPECIAL |= {name: lambda name: type(name, (), {}) for name in ("Autotuner", "JITFunction", "CompiledKernel")}
_SPECIAL |= {name: lambda name: type(name, (Exception,), {}) for name in ("OutOfResources", "CompilationError")}

jit, autotune, heuristics = (Decorator(f"triton.{name}") for name in ("jit", "autotune", "heuristics"))
__getattr__ = everything_of(
    "triton",
    _SPECIAL,
    submodules=("backends", "compiler", "language", "runtime", "testing", "tools"),
    without=("knobs",),  # where SGLang would register what is to be told when a kernel is loaded
)
