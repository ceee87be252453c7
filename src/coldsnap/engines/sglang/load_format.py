"""``--load-format coldsnap``: SGLang's own way to load, with the bytes from elsewhere.

The directive says from where: a pack, or a checkpoint beside the files that the engine was started with. The same
format serves ``update_weights_from_disk``, which names a checkpoint itself. A template's load is ours without the name:
not every SGLang lets a plugin add to what its command line knows.

The one rule: SGLang makes the model before this, and post-processes its weights after it, by its own code; only what is
between the two is ours.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

from coldsnap.engines.ordered import LOAD_FORMAT, ordered
from coldsnap.engines.settings import setting
from coldsnap.engines.sglang.hooking import Hook
from coldsnap.engines.sglang.loading import loads
from coldsnap.errors import ContractError

__all__ = ["LOAD_FORMAT", "announce", "hooks"]


def announce() -> None:
    """Make the name known to SGLang's command line; for the process that reads it."""
    from sglang.srt import server_args  # noqa: PLC0415  only the engine's environment has it

    server_args.add_load_format_choices([LOAD_FORMAT])


def hooks() -> tuple[Hook, ...]:
    """Return what turns the name into what loads."""
    return (Hook(target="sglang.srt.configs.load_config.LoadConfig._verify_load_format", wrapper=_verify),)


def _verify(original: Any, load_config: Any) -> None:
    # 0.5.17 reads its command line before it loads plugins, so that it takes no name that it does not know: a start
    # that is ours is then told by the setting, or the directive, alone.
    ours = setting("COLDSNAP_SGLANG_STARTUP_PROVIDER") != "" and load_config.load_format == "auto"
    if ours or load_config.load_format == LOAD_FORMAT or ordered.awaits():
        load_config.load_format = loader_class()
        return
    original(load_config)


@functools.cache
def loader_class() -> Any:
    """Return the loader; SGLang makes an instance of a load format that is a class."""
    from sglang.srt.model_loader.loader import DefaultModelLoader  # noqa: PLC0415

    class ColdSnapLoader(DefaultModelLoader):  # type: ignore[misc]  # SGLang is not there where types are checked
        """Reads a pack, or a checkpoint."""

        def __init__(self, load_config: Any) -> None:
            load_config = copy.copy(load_config)
            load_config.load_format = type_of(setting("COLDSNAP_SGLANG_RECOVERY_LOAD_FORMAT"))
            super().__init__(load_config)
            self._order: Any = None

        def download_model(self, model_config: Any) -> None:
            """Return: an engine is started offline, with what it needs at hand."""

        def load_model(self, *, model_config: Any, device_config: Any) -> Any:
            """Make a model, fill it as the directive says, and have it post-processed."""
            self._order = ordered.order()
            _require_provider(self._order.provider)
            if not self._order.fills:
                checkpoint = ordered.checkpoint(self._order)
                self.load_config.load_format = type_of(checkpoint.load_format)
            model = super().load_model(model_config=model_config, device_config=device_config)
            if not self._order.fills:
                ordered.loaded_from(checkpoint.path, self._order)
            return model

        def _get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
            if self._order.fills:
                return iter(())
            there = copy.copy(model_config)
            there.model_path, there.revision = ordered.checkpoint(self._order).path, None
            weights: Iterator[tuple[str, Any]] = super()._get_all_weights(there, model)
            return weights

        def load_weights_and_postprocess(self, model: Any, weights: Any, target_device: Any) -> None:
            """Fill a model that was made."""
            if self._order is None or not self._order.fills:
                DefaultModelLoader.load_weights_and_postprocess(model, weights, target_device)
                return
            loads.unobserved.add(model)
            model.load_weights = lambda _: ordered.start(model, self._order)
            try:
                DefaultModelLoader.load_weights_and_postprocess(model, weights, target_device)
            finally:
                del model.load_weights

    return ColdSnapLoader


def _require_provider(ordered_provider: str) -> None:
    told = setting("COLDSNAP_SGLANG_STARTUP_PROVIDER")
    if told not in ("", ordered_provider):
        raise ContractError(
            f"COLDSNAP_SGLANG_STARTUP_PROVIDER is {told!r} and the directive's provider {ordered_provider!r}: this "
            "server was launched for another start"
        )


def type_of(name: str) -> Any:
    """Return SGLang's name for a load format."""
    from sglang.srt.configs.load_config import LoadFormat  # noqa: PLC0415

    return LoadFormat(name)
