"""What an engine does around the release and the return of a worker's memory.

The one rule: what is called before something is given away must leave an engine that can run on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

__all__ = ["Hooks"]


def _nothing() -> None:
    """Do nothing."""


def _nothing_with(_tags: Sequence[str]) -> None:
    """Do nothing."""


@frozen(kw_only=True)
class Hooks:
    """What the engine does around it.

    Attributes:
        before_release: Wait for the device, empty caches; the engine must be able to run on after it.
        after_release: Give back what the release made superfluous.
        before_hydrate: Make room; called with the tags.
        after_hydrate: Put graphs and caches back; called with the tags, before the memory counts as awake.
    """

    before_release: Callable[[], None] = _nothing
    after_release: Callable[[], None] = _nothing
    before_hydrate: Callable[[Sequence[str]], None] = _nothing_with
    after_hydrate: Callable[[Sequence[str]], None] = _nothing_with
