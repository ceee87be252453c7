"""``update_weights_from_disk`` with the load format ``coldsnap``: each model from its own checkpoint.

SGLang hands one path to the target and to every draft model. The one rule: a draft model is loaded from where it was
loaded from at first; the target from where the caller says.
"""

from __future__ import annotations

from typing import Any

from coldsnap.engines.ordered import LOAD_FORMAT
from coldsnap.engines.sglang.hooking import Hook
from coldsnap.engines.sglang.worker import Resident

__all__ = ["Updates"]

_TARGET = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_disk"


class Updates:
    """The hook on SGLang's ``WeightUpdater``, of which each model has one.

    Args:
        resident: Knows the models, and where they came from.
    """

    def __init__(self, resident: Resident) -> None:
        self._resident = resident

    def hooks(self) -> tuple[Hook, ...]:
        """Return what is hooked."""
        return (Hook(target=_TARGET, wrapper=self.update, parameters=("model_path", "load_format")),)

    def update(self, original: Any, updater: Any, model_path: str, load_format: str, *args: Any, **kwargs: Any) -> Any:
        """Load one model again."""
        if load_format == LOAD_FORMAT:
            model_path = self._resident.draft_path(updater.get_model()) or model_path
        return original(updater, model_path, load_format, *args, **kwargs)
