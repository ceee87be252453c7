"""``--load-format coldsnap``: vLLM's own way to load, with the bytes from elsewhere.

The one rule: vLLM makes the model before this, and post-processes its weights after it, by its own code; only what is
between the two is ours.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from coldsnap.engines.vllm.ordered import LOAD_FORMAT, ordered

__all__ = ["MODEL_LOADER", "register_load_format"]

MODEL_LOADER = "vllm.model_executor.model_loader"


def register_load_format(module: ModuleType) -> None:
    """Make the load format known to vLLM.

    Args:
        module: ``vllm.model_executor.model_loader``, imported.
    """

    class ColdSnapLoader(module.BaseModelLoader):  # type: ignore[misc,name-defined]  # vLLM is not there to be looked at
        """Reads a pack, or a checkpoint that the directive names."""

        def download_model(self, model_config: Any) -> None:
            """Return: an engine is started offline, with what it needs at hand."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Fill a model that was made."""
            ordered.load(self, model, model_config)

    module.register_model_loader(LOAD_FORMAT)(ColdSnapLoader)
