"""Hooks on SGLang's registry: looked at before they are registered, and looked for after they were applied.

SGLang skips a hook whose target is not there, logs that, and serves on. The one rule: every hook that was asked for is
on, or the process ends.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

from attrs import frozen

from coldsnap.errors import ContractError

__all__ = ["Hook", "Hooking", "Wrapper"]

Wrapper = Callable[..., Any]
"""``wrapper(original, *args, **kwargs)``"""


@frozen(kw_only=True)
class Hook:
    """One hook.

    Attributes:
        target: What is hooked: ``package.module.Class.method``.
        wrapper: Called with what it hooks, and its arguments.
        parameters: What the target must take.
    """

    target: str
    wrapper: Wrapper
    parameters: tuple[str, ...] = ()

    def lacks(self) -> str:
        """Say what the target lacks, in the SGLang of this process; empty when it is as expected."""
        try:
            found = pkgutil.resolve_name(self.target)
        except (ImportError, AttributeError) as error:
            return f"{self.target} does not exist ({error})"
        if not callable(found) or isinstance(found, type):
            return f"{self.target} is no function"
        absent = sorted({*self.parameters} - {*inspect.signature(found).parameters})
        return f"{self.target} does not take {', '.join(absent)}" if absent else ""


class Hooking:
    """The hooks of one process.

    Args:
        registry: SGLang's ``HookRegistry``.
        around: SGLang's ``HookType.AROUND``.
        abort: Ends the process.
    """

    def __init__(self, registry: Any, around: Any, abort: Callable[[BaseException], Any]) -> None:
        self._registry = registry
        self._around = around
        self._abort = abort

    def register(self, hooks: tuple[Hook, ...]) -> None:
        """Register hooks, and have them looked for as soon as SGLang has applied them.

        Raises:
            ContractError: With every target that is not as expected; nothing was registered.
        """
        if lacks := [text for hook in hooks if (text := hook.lacks())]:
            raise ContractError("this SGLang lacks what the plugin hooks:", lacks)
        before = {hook.target: _at(hook.target) for hook in hooks}
        for hook in hooks:
            self._registry.register(hook.target, hook.wrapper, self._around)
        self._confirm_after(before)

    def _confirm_after(self, before: dict[str, Any]) -> None:
        # SGLang applies all hooks once every plugin was called; there is no place of its own to look at them then.
        original = self._registry.apply_hooks

        def apply_hooks() -> None:
            self._registry.apply_hooks = original
            try:
                original()
                self._confirm(before)
            except BaseException as error:  # noqa: BLE001  SGLang would serve on
                self._abort(error)

        self._registry.apply_hooks = apply_hooks

    def _confirm(self, before: dict[str, Any]) -> None:
        absent = [
            f"{target} was not patched"
            for target, found in before.items()
            if target not in self._registry._patched or _at(target) is found  # noqa: SLF001  it has no other list
        ]
        if absent:
            raise ContractError("SGLang did not apply hooks that the plugin needs (its log says why):", absent)


def _at(target: str) -> Any:
    """Return what is stored under a name, not what looking it up makes of it."""
    owner_name, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    return inspect.getattr_static(owner, name)
