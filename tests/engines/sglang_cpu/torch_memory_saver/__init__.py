"""Stand-in for torch_memory_saver: tagged memory whose contents come and go while its addresses stay, on a processor.

The real one is preloaded below CUDA's allocator. This one gives every tensor that is *made* inside a region (by an
operation without tensors among its arguments: ``empty``, ``zeros``, ``ones``, …) memory of ColdSnap's own provider for
hosts. What is computed from other tensors stays in torch's memory, as it does for the real one behind its back.

The one rule: what the real one loses is lost here too: the pages go back to the kernel, and come back as zeros.
"""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from coldsnap.transfer.memory import HostMemory

__all__ = ["configure_subprocess", "torch_memory_saver"]


class _Placed(TorchDispatchMode):
    """Moves what factories make into a provider's memory."""

    def __init__(self, memory, tag):
        super().__init__()
        self.memory, self.tag = memory, tag

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs))):
            return made
        return tree_map(self._place, made)

    def _place(self, made):
        if not isinstance(made, torch.Tensor) or made.device.type != "cpu" or not made.untyped_storage().nbytes():
            return made
        size = made.untyped_storage().nbytes()
        region = self.memory.allocate(size, tag=self.tag)
        whole = torch.frombuffer(self.memory.buffer(region), dtype=torch.uint8)
        placed = torch.empty(0, dtype=made.dtype)
        placed.set_(whole.untyped_storage(), made.storage_offset(), made.size(), made.stride())
        return placed.copy_(made)


class Saver:
    """What SGLang's adapter calls.

    Attributes:
        memory: The provider; regions have SGLang's tags.
    """

    enabled = True
    hook_mode = None

    def __init__(self):
        self.memory = HostMemory()

    @contextlib.contextmanager
    def region(self, tag="default", enable_cpu_backup=False, **_):
        """Give what is made inside memory that can be released."""
        with _Placed(self.memory, tag):
            yield

    def pause(self, tag=None):
        """Give the pages of a tag, or of all, back to the kernel."""
        self.memory.release(self.memory.regions(tag))

    def resume(self, tag=None):
        """Bring zeroed pages."""
        self.memory.remap(self.memory.regions(tag))

    @contextlib.contextmanager
    def cuda_graph(self, *_, **__):
        """Capture nothing: there are no graphs here."""
        yield

    @contextlib.contextmanager
    def disable(self):
        """Make tensors in torch's own memory, inside a region too."""
        with torch.utils._python_dispatch._disable_current_modes():
            yield


torch_memory_saver = Saver()


@contextlib.contextmanager
def configure_subprocess():
    """Preload nothing into the processes that are started inside."""
    yield
