"""How much a destination may differ from the machine of the capture.

The one rule: these leaves only ever narrow what admission accepts; architecture, GPU model, snapshot driver, runtime
providers and topology are compared exactly whatever they say.
"""

# leaf() and part() return attrs fields, which no two instances share.
# ruff: noqa: RUF009

from __future__ import annotations

from typing import Literal, get_args

from attrs import frozen

from coldsnap.policy.leaf import Section, leaf, section
from coldsnap.policy.limits import Flag, OneOf

__all__ = ["Compatibility"]

Kernel = Literal["capability", "exact"]
Driver = Literal["release", "probed", "n580"]


@section("compatibility")
@frozen(kw_only=True, repr=False)
class Compatibility(Section):
    """What admission compares between the capture and the destination."""

    kernel: Kernel = leaf(
        "capability",
        OneOf(get_args(Kernel)),
        doc="capability: the kernel release is provenance, and the capsule's CRIU checks the destination's kernel. "
        "exact: the uname release must also be equal.",
    )
    driver: Driver = leaf(
        "release",
        OneOf(get_args(Driver)),
        doc="release: the NVIDIA driver's number decides (N580 from 580, N610 from 610). "
        "probed: the number is provenance, and a qualification record of this boot decides. "
        "n580: the portable template wherever it can be, also on a host without a GPU.",
    )
    enforce_captured_driver_floor: bool = leaf(
        True,
        Flag(),
        doc="Refuse a destination whose NVIDIA driver is older than the one of the capture.",
    )
