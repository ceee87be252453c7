"""What happens to captured CUDA graphs.

The one rule: a graph is either proven to survive or made anew from the engine's own plan; never assumed.
"""

# leaf() and part() return attrs fields, which no two instances share.
# ruff: noqa: RUF009

from __future__ import annotations

from typing import Literal, get_args

from attrs import frozen

from coldsnap.policy.leaf import Section, leaf, section
from coldsnap.policy.limits import Flag, OneOf

__all__ = ["Graphs"]

GraphPolicy = Literal["auto", "preserve-exec", "recreate-from-plan", "preserve-nccl-exec", "disabled"]


@section("graphs")
@frozen(kw_only=True, repr=False)
class Graphs(Section):
    """What happens to captured CUDA graphs."""

    policy: GraphPolicy = leaf(
        "auto",
        OneOf(get_args(GraphPolicy)),
        doc="auto: N580 recreates; N610 with one worker retains when its acceptance passes; N610 with several "
        "preserves over NCCL when qualified, else recreates. disabled: no graphs.",
    )
    # False until asynchronous graphs exist; then the default becomes true.
    asynchronous: bool = leaf(
        False,
        Flag(),
        doc="Serve eagerly first and capture graphs after the first completed request, when the scheduler is idle.",
    )
