"""SGLang: ``engine`` is the caller's side, ``plugin`` and what it imports run inside the ranks.

The one rule: importing this package imports nothing, because every rank does it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coldsnap.engines.sglang.engine import SGLang

__all__ = ["SGLang"]


def __getattr__(name: str) -> object:
    if name == "SGLang":
        from coldsnap.engines.sglang.engine import SGLang  # noqa: PLC0415  see the rule above

        return SGLang
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
