"""What a load really copied: from which bytes of which safetensors file, to which bytes of which destination.

Names tell little: an engine shards, stacks, converts and repacks while it loads. So each tensor that the loader is
given is bound to its range of the file, and each operation of the load that writes to a parameter or buffer is looked
at.

The one rule: what was not seen exactly is not in the record. A destination that was written in any other way than by a
copy of bound bytes is unsupported, with the first reason.

::

    with LoadObserver(model) as observer:
        model.load_weights(observer.bound(iterator, index(files)))
    observer.record.settle(model).written
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coldsnap.engines.weights.destinations import Place
from coldsnap.engines.weights.load_record import LoadRecord
from coldsnap.engines.weights.recorder import Recorder
from coldsnap.errors import ContractError
from coldsnap.transfer.safetensors import Stored

__all__ = ["LoadObserver", "or_not_observable"]

_ITEM = torch.ops.aten._local_scalar_dense.default  # noqa: SLF001  an operator's name


@contextmanager
def or_not_observable(what: str = "the files") -> Iterator[None]:
    """Turn any failure of observing into the one error that ends the load.

    Args:
        what: What led to it.

    Raises:
        ContractError: With the failure as its cause.
    """
    try:
        yield
    except Exception as error:
        sentence = f"the load cannot be observed: {what} led to {type(error).__name__}: {error}"
        raise ContractError(f"{sentence}; launch with weights.mode = 'image'") from error


class LoadObserver:
    """Watches one load of one model, as a context manager around it.

    The thread of the load is watched from begin to end; a thread of the engine's own, for as long as the loader of a
    destination runs in it.

    Attributes:
        record: What was seen, once the context has ended without an error.
    """

    record: LoadRecord

    def __init__(self, model: Any) -> None:
        self._model = model
        self._recorder = Recorder(model)
        self._here = _Here()
        self._stack = ExitStack()
        self._active = False

    def __enter__(self) -> Self:
        with ExitStack() as stack, or_not_observable("wrapping its loaders"):
            for tensor in self._recorder.destinations.tensors:
                self._wrap_loader(tensor, stack)
            stack.enter_context(self._watching())
            stack.callback(setattr, self, "_active", False)
            self._active = True
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if kind is None:
            with or_not_observable("the end of the load"):
                self._recorder.finish()
                self.record = LoadRecord.of(self._model, self._recorder.copies, self._recorder.refused)
        del self._recorder  # with it go the weak references to everything that was loaded

    def bind(self, tensor: Any, stored: Stored | None) -> None:
        """Say that a tensor, which the loader is about to get, is what the header of its file describes.

        Args:
            tensor: One of another type, shape or size than the header has makes what is copied from it unsupported.
            stored: None for a tensor that is in no header, with the same effect.
        """
        self._recorder.bind(tensor, stored)

    def bound(self, weights: Iterable[tuple[str, Any]], stored: Mapping[str, Stored]) -> Iterator[tuple[str, Any]]:
        """Bind each tensor of a weights iterator on its way to the loader."""
        for name, tensor in weights:
            self.bind(tensor, stored.get(name))
            yield name, tensor

    def _wrap_loader(self, tensor: Any, stack: ExitStack) -> None:
        original = getattr(tensor, "weight_loader", None)
        if original is None:
            return  # loaded by a default, in the thread that is watched anyhow

        @functools.wraps(original)
        def loader(*args: Any, **kwargs: Any) -> Any:
            # The wrapper may outlive the load, in a parameter that was made of this one.
            if not self._active:
                return original(*args, **kwargs)
            with self._loading(tensor):
                return original(*args, **kwargs)

        stack.callback(_unwrap, tensor, loader, original)
        tensor.weight_loader = loader

    def _loading(self, tensor: Any) -> ExitStack:
        stack = ExitStack()
        stack.callback(self._here.become, self._here.loader)
        self._here.become(self._recorder.begins(tensor))
        if not self._here.watched:
            stack.enter_context(self._watching())
        return stack

    def _watching(self) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(_Watch(self._recorder, self._here))
        stack.callback(setattr, self._here, "watched", False)
        self._here.watched = True
        return stack


class _Here(threading.local):
    """What a thread of the load is at."""

    loader: Place | None = None
    scalar: tuple[Any, Any] | None = None  # the number that the loader read last, and the tensor it was in
    watched: bool = False

    def become(self, loader: Place | None) -> None:
        self.loader, self.scalar = loader, None


class _Watch(TorchDispatchMode):  # type: ignore[misc]  # torch is not there where types are checked
    """Sees every operation of a thread before it is done."""

    def __init__(self, recorder: Recorder, here: _Here) -> None:
        super().__init__()
        self._recorder = recorder
        self._here = here

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if writes := _writes(func):
            targets = list(_targets(writes, args, kwargs))
            loader = self._here.loader
            with or_not_observable(f"{func} in the loader of {loader.name}" if loader else str(func)):
                self._recorder.wrote(func, args, targets, loader, self._here.scalar)
        elif func is _ITEM:
            self._here.scalar = (result, args[0])
        return result


@functools.cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of the arguments whose bytes an operation changes."""
    if torch.Tag.inplace_view in func.tags:
        return ()  # changes shape or strides, no byte
    arguments = enumerate(func._schema.arguments)  # noqa: SLF001  the only description there is
    return tuple((at, one.name) for at, one in arguments if one.alias_info is not None and one.alias_info.is_write)


def _targets(writes: tuple[tuple[int, str], ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for at, name in writes:
        value = args[at] if at < len(args) else kwargs.get(name)
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, torch.Tensor):
                yield one


def _unwrap(tensor: Any, loader: Callable[..., Any], original: Callable[..., Any]) -> None:
    if getattr(tensor, "weight_loader", None) is loader:
        tensor.weight_loader = original
