"""vLLM: ``engine`` is the caller's side, ``plugin`` and what it imports run inside the ranks.

The one rule: importing this package imports nothing, because every rank does it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coldsnap.engines.vllm.engine import VLLM

__all__ = ["VLLM"]


def __getattr__(name: str) -> object:
    if name == "VLLM":
        from coldsnap.engines.vllm.engine import VLLM  # noqa: PLC0415  see the rule above

        return VLLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
