"""``--load-format coldsnap``: vLLM's own way to load, with the bytes from elsewhere.

The one rule: vLLM makes the model before this, and post-processes its weights after it, by its own code; only what is
between the two is ours.
"""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

from coldsnap.engines.ordered import LOAD_FORMAT, ordered
from coldsnap.keeper.directive import Directive

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
            directive = ordered.order()
            if directive.fills:
                ordered.start(model, directive)
            else:
                _from_checkpoint(module, self.load_config, model, model_config, directive)

    module.register_model_loader(LOAD_FORMAT)(ColdSnapLoader)


def _from_checkpoint(module: ModuleType, load_config: Any, model: Any, model_config: Any, directive: Directive) -> None:
    checkpoint = ordered.checkpoint(directive)
    # Copies: what the engine says about itself, and caches by, stays what it was started with.
    load_config, there = copy.copy(load_config), copy.copy(model_config)
    load_config.load_format = checkpoint.load_format
    there.model, there.revision = checkpoint.path, None
    module.get_model_loader(load_config).load_weights(model, there)
    ordered.loaded_from(checkpoint.path, directive)
