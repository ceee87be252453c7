"""The load observer around SGLang's loading of a model.

SGLang's default loader makes an iterator of weights from a list of files, and hands it with the model to
``load_weights_and_postprocess``. Both are hooked: the iterators bind what they yield, and the model's own
``load_weights`` runs under an observer.

The one rule: that of :mod:`coldsnap.engines.weights.loads`.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from coldsnap.engines.sglang.contract import ITERATORS
from coldsnap.engines.sglang.hooking import Hook, Wrapper
from coldsnap.engines.weights.loads import Loads, is_asked_for

__all__ = ["SglangLoads", "is_asked_for", "loads"]

_LOAD = "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_and_postprocess"
_READERS = "sglang.srt.model_loader.weight_utils"


class DefaultModelLoader:
    """Whose load it is, for whoever asks; SGLang calls the function that is hooked without one."""


class SglangLoads(Loads):
    """The loads of one process, by the model that was loaded.

    Attributes:
        unobserved: Models that get their weights in another way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unobserved: WeakSet[Any] = WeakSet()

    def hooks(self) -> tuple[Hook, ...]:
        """Return what is hooked."""
        return (
            Hook(target=_LOAD, wrapper=self._load, parameters=("model", "weights", "target_device")),
            *(
                Hook(target=f"{_READERS}.{name}", wrapper=self._read, parameters=("hf_weights_files",))
                for name in ITERATORS
            ),
        )

    def _load(self, original: Wrapper, model: Any, *args: Any, **kwargs: Any) -> Any:
        if model in self._by_model or model in self.unobserved:
            return original(model, *args, **kwargs)  # weights that are updated: what is where was seen at first
        load_weights = model.load_weights
        observed = self.observing(lambda _, __, *rest, **named: load_weights(*rest, **named))
        # Releases differ in what they do before and after; all of them call this.
        model.load_weights = lambda *rest, **named: observed(DefaultModelLoader(), model, *rest, **named)
        try:
            return original(model, *args, **kwargs)
        finally:
            del model.load_weights

    def _read(self, original: Wrapper, *args: Any, **kwargs: Any) -> Any:
        return self.binding(original)(*args, **kwargs)


loads = SglangLoads()
"""Those of this process."""
