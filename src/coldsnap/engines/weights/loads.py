"""The load observer around an engine's loading of a model, whatever the engine.

An engine's loader makes an iterator of weights from a list of files and hands it to the model. Its iterators are
replaced by ones that bind each tensor to its range of these files before the model gets it (:meth:`Loads.binding`), and
what loads runs under an observer (:meth:`Loads.observing`); which functions these are is the engine's matter. Other
loaders (dummy weights, sharded states, streams) are left alone: nothing is known of what they wrote.

The one rule: observing is asked for before the engine is launched, and then it happens. What stands in its way ends the
load with a ContractError; an engine that serves with a part of its load unseen would be found out at its capture only.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from attrs import frozen

from coldsnap.engines.ordered import ordered
from coldsnap.engines.settings import setting
from coldsnap.transfer.heap import large_blocks_returned

if TYPE_CHECKING:
    from coldsnap.engines.rank import Operation
    from coldsnap.engines.weights.load_record import LoadRecord, Settled
    from coldsnap.engines.weights.observe import LoadObserver

__all__ = ["NOT_OBSERVED", "Iterate", "Loads", "is_asked_for"]

NOT_OBSERVED = "not-observed"

Iterate = Callable[..., Iterator[tuple[str, Any]]]


def is_asked_for() -> bool:
    """Tell whether the weights of this engine may leave its memory for a pack, or come back from the checkpoint."""
    packs = setting("COLDSNAP_EXPORT_MODEL_PAYLOAD") == "1"
    return packs or setting("COLDSNAP_RECOVERY_WEIGHT_SOURCE") == "safetensors"


@frozen
class _Load:
    record: LoadRecord
    loader: str


class Loads:
    """The loads of one process, by the model that was loaded."""

    def __init__(self) -> None:
        # Beside the models, not in them: a model may be copied or pickled, a record holds weak references.
        self._by_model: WeakKeyDictionary[Any, _Load] = WeakKeyDictionary()
        self._here = threading.local()

    def settle(self, model: Any) -> Settled:
        """Say what the loads of a model wrote, and where that is now; of a load that nobody saw, nothing is known.

        Args:
            model: What was loaded, or a model around it; its memory is there and at rest.
        """
        from coldsnap.engines.weights.load_record import Settled  # noqa: PLC0415  torch is there once a model is

        loads = [load for part in model.modules() if (load := self._by_model.get(part)) is not None]
        if not loads:
            tensors = (*model.parameters(), *model.buffers())
            unseen = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            return Settled(written=(), kept={NOT_OBSERVED: unseen}, unsupported={})
        found = [load.record.settle(model) for load in loads]
        return Settled(
            written=tuple(written for one in found for written in one.written),
            kept=dict(sum((Counter(one.kept) for one in found), Counter())),
            unsupported={name: reason for one in found for name, reason in one.unsupported.items()},
            copies=tuple(copy for one in found for copy in one.copies),
            # What one load explains is derived to the others.
            derived={
                name: size for name, size in found[0].derived.items() if all(name in one.derived for one in found)
            },
        )

    def operations(self) -> Mapping[str, Operation]:
        """Return what a rank answers about its loads."""
        return {"loaded": self.loaded}

    def loaded(self, _request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Count what was seen: ``copies``, ``bytes`` written, what was left out by reason, and the loader's name.

        ``unsupported`` counts destinations, ``kept`` their bytes. The memory may be asleep: nothing reads it here, so
        that what changed after the load is not found.
        """
        loads = list(self._by_model.items())
        if not loads:
            return {"skipped": True}
        found = [load.record.settle(model, compare=False) for model, load in loads]
        return {
            "copies": sum(len(load.record.copies) for _, load in loads),
            "bytes": sum(written.size for one in found for written in one.written),
            "unsupported": dict(Counter(reason for one in found for reason in one.unsupported.values())),
            "kept": dict(sum((Counter(one.kept) for one in found), Counter())),
            "loader": ", ".join(sorted({load.loader for _, load in loads})),
        }

    def observing(self, load_weights: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that loads under an observer: of a loader and a model, and what else it takes."""

        @functools.wraps(load_weights)
        def observed(loader: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            from coldsnap.engines.weights.observe import LoadObserver  # noqa: PLC0415  imports torch

            outer: LoadObserver | None = getattr(self._here, "observer", None)
            if outer is not None:
                return load_weights(loader, model, *args, **kwargs)  # a loader of a subclass that calls its parent's
            # These weights are to leave the process: no thread of the load may keep blocks it has freed.
            with large_blocks_returned(), LoadObserver(model) as observer:
                self._here.observer = observer
                try:
                    result = load_weights(loader, model, *args, **kwargs)
                finally:
                    self._here.observer = None
            self._by_model[model] = _Load(observer.record, type(loader).__name__)
            ordered.loaded(model, observer.record)
            return result

        return observed

    def binding(self, iterate: Iterate) -> Iterate:
        """Return an iterator of weights that binds what it yields: of a list of files, and what else it takes."""

        @functools.wraps(iterate)
        def bound(hf_weights_files: Sequence[str], *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            from coldsnap.engines.weights.observe import or_not_observable  # noqa: PLC0415
            from coldsnap.transfer.safetensors import index  # noqa: PLC0415

            observer: LoadObserver | None = getattr(self._here, "observer", None)
            weights = iterate(hf_weights_files, *args, **kwargs)
            if observer is None:
                return weights  # a reload into a model that serves
            with or_not_observable():
                stored = index(hf_weights_files)
            return observer.bound(weights, stored)

        return bound
