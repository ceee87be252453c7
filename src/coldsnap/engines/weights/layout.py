"""Where the tensors of a model lie, as a bootstrap index has it: written at a capture, compared at a fresh start.

The one rule: two layouts are the same when a load that fills one fills the other; every difference is told by name, and
none is bridged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

from attrs import frozen

from coldsnap.artifact.bootstrap import BootstrapIndex, BootstrapTensor
from coldsnap.artifact.extents import Allocation
from coldsnap.engines.weights.storages import dtype_name, storage_of
from coldsnap.engines.weights.tensors import WEIGHTS, TensorMemory, persistent_tensors
from coldsnap.errors import AdmissionError, ContractError

__all__ = ["Layout"]

_SHOWN = 8


@frozen(kw_only=True)
class Layout:
    """The layout of one model in this process.

    Attributes:
        memory: Its storages.
        allocations: One for each storage, ascending by address.
        tensors: What lies in them, ascending by name.
    """

    memory: TensorMemory
    allocations: tuple[Allocation, ...]
    tensors: tuple[BootstrapTensor, ...]

    @classmethod
    def of(cls, model: Any, also: Iterable[str] = ()) -> Self:
        """Look at a model.

        Args:
            model: The module, its parameters allocated.
            also: As for :func:`~coldsnap.engines.weights.tensors.persistent_tensors`.

        Raises:
            ContractError: A tensor has no memory, or a type that safetensors has no name for.
        """
        tensors, parameters = persistent_tensors(model, also), dict(model.named_parameters(remove_duplicate=False))
        memory = TensorMemory(tensors)
        regions = memory.regions()
        places = {region.address: index for index, region in enumerate(regions)}
        return cls(
            memory=memory,
            allocations=tuple(
                Allocation(address=one.address, size=one.size_bytes, region=WEIGHTS, device=memory.device)
                for one in regions
            ),
            tensors=tuple(
                _described(name, one, "parameter" if name in parameters else "buffer", places)
                for name, one in tensors.items()
            ),
        )

    def bases(self, index: BootstrapIndex, sizes: Sequence[int]) -> Mapping[int, int]:
        """Compare this layout with a captured one, and return where each captured allocation is here.

        Args:
            index: The captured layout.
            sizes: Of its allocations, bytes.

        Returns:
            Captured allocation → address in this process.

        Raises:
            AdmissionError: They differ; the first differences are named.
        """
        here = {one.name: one for one in self.tensors}
        there = {one.name: one for one in index.tensors}
        lines = [*_other_tensors(there, here)]
        pairs = {(one.allocation, here[name].allocation) for name, one in there.items() if name in here}
        lines += [] if lines else _other_storages(pairs, sizes, self.allocations, there.values(), here)
        if lines:
            more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
            raise AdmissionError(
                f"the model of this engine is not laid out as that of {index.worker} in capture {index.capture_id}:",
                [*lines[:_SHOWN], *more],
            )
        return {captured: self.allocations[found].address for captured, found in pairs}


def _described(
    name: str, tensor: Any, role: Literal["parameter", "buffer"], places: Mapping[int, int]
) -> BootstrapTensor:
    dtype = dtype_name(tensor.dtype)
    if dtype is None:
        raise ContractError(f"{name} is of type {tensor.dtype}, which a checkpoint has no name for")
    return BootstrapTensor(
        name=name,
        role=role,
        dtype=dtype,
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        allocation=places[storage_of(tensor).data_ptr()],
        offset=tensor.storage_offset() * tensor.element_size(),
    )


def _other_tensors(there: Mapping[str, BootstrapTensor], here: Mapping[str, BootstrapTensor]) -> Iterator[str]:
    for name in sorted(there.keys() | here.keys()):
        captured, found = there.get(name), here.get(name)
        if captured is None or found is None:
            yield f"{name} is only in {'this engine' if captured is None else 'the capture'}"
        elif _form(captured) != _form(found):
            yield f"{name}: captured {_told(captured)}, found {_told(found)}"


def _other_storages(
    pairs: Iterable[tuple[int, int]],
    sizes: Sequence[int],
    allocations: Sequence[Allocation],
    captured: Iterable[BootstrapTensor],
    here: Mapping[str, BootstrapTensor],
) -> Iterator[str]:
    """Yield which tensors share memory in one process only, or lie elsewhere in memory of another size."""
    partners: dict[int, set[int]] = {}
    back: dict[int, set[int]] = {}
    for one, other in pairs:
        partners.setdefault(one, set()).add(other)
        back.setdefault(other, set()).add(one)
    for tensor in captured:
        found = here[tensor.name]
        if len(partners[tensor.allocation]) > 1 or len(back[found.allocation]) > 1:
            yield f"{tensor.name} shares memory with other tensors than at the capture"
        elif tensor.offset != found.offset or sizes[tensor.allocation] != allocations[found.allocation].size:
            where = f"byte {found.offset} of {allocations[found.allocation].size}"
            yield f"{tensor.name}: captured at byte {tensor.offset} of {sizes[tensor.allocation]}, found at {where}"


def _form(tensor: BootstrapTensor) -> tuple[Any, ...]:
    return tensor.role, tensor.dtype, tensor.shape, tensor.stride


def _told(tensor: BootstrapTensor) -> str:
    return f"{tensor.role} {tensor.dtype} {list(tensor.shape)} strides {list(tensor.stride)}"
