"""The load observer around vLLM's loading of a model: what of its default loader is hooked.

The one rule: that of :mod:`coldsnap.engines.weights.loads`.
"""

from __future__ import annotations

from typing import Any

from coldsnap.engines.weights.loads import NOT_OBSERVED, Loads, is_asked_for
from coldsnap.errors import ContractError

__all__ = ["DEFAULT_LOADER", "ITERATORS", "NOT_OBSERVED", "VllmLoads", "is_asked_for", "loads"]

DEFAULT_LOADER = "vllm.model_executor.model_loader.default_loader"
ITERATORS = (
    "safetensors_weights_iterator",
    "multi_thread_safetensors_weights_iterator",
    "fastsafetensors_weights_iterator",
    "instanttensor_weights_iterator",
)


class VllmLoads(Loads):
    """The loads of one process, by the model that was loaded."""

    def watch(self, module: Any) -> None:
        """Put the hooks on vLLM's default loader.

        Args:
            module: ``vllm.model_executor.model_loader.default_loader``.

        Raises:
            ContractError: It has not what is hooked.
        """
        absent = [name for name in (*ITERATORS, "DefaultModelLoader") if not hasattr(module, name)]
        if absent:
            raise ContractError(f"{module.__name__} lacks what the load observer hooks:", absent)
        for name in ITERATORS:
            setattr(module, name, self.binding(getattr(module, name)))
        module.DefaultModelLoader.load_weights = self.observing(module.DefaultModelLoader.load_weights)


loads = VllmLoads()
"""Those of this process."""
