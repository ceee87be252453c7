"""How bytes move between storage and memory.

The one rule: an explicit backend or mode never degrades; only ``auto`` chooses, and says in the receipt what it chose.
"""

# leaf() and part() return attrs fields, which no two instances share.
# ruff: noqa: RUF009

from __future__ import annotations

from typing import Literal, get_args

from attrs import frozen

from coldsnap.policy.leaf import Section, leaf, section
from coldsnap.policy.limits import MIB, PAGE_BYTES, Flag, OneOf, Pattern, Span

__all__ = ["IO"]

HydrationBackend = Literal["auto", "python", "buffered", "direct", "gds"]
CaptureBackend = Literal["auto", "python", "buffered", "direct"]
HibernateMode = Literal["direct", "buffered"]
VerifyMode = Literal["inline", "preverified"]
ImageCompression = Literal["auto", "lz4", "none"]


@section("io")
@frozen(kw_only=True, repr=False)
class IO(Section):
    """How bytes move between storage and memory."""

    hydration_backend: HydrationBackend = leaf(
        "python",
        OneOf(get_args(HydrationBackend)),
        doc="How weights reach memory at restore; engines whose weights are in packs make auto their default. "
        "gds: needs verify_mode preverified, since its bytes never pass through host memory.",
    )
    capture_backend: CaptureBackend = leaf(
        "auto",
        OneOf(get_args(CaptureBackend)),
        doc="How weights leave memory at capture. auto: direct where the layout is aligned and the filesystem "
        "takes it, else buffered.",
    )
    hibernate_read_mode: HibernateMode = leaf(
        "direct", OneOf(get_args(HibernateMode)), doc="How hibernated state is read."
    )
    hibernate_write_mode: HibernateMode = leaf(
        "direct", OneOf(get_args(HibernateMode)), doc="How hibernated state is written."
    )
    verify_mode: VerifyMode = leaf(
        "inline",
        OneOf(get_args(VerifyMode)),
        doc="inline: digests are computed while bytes move. preverified: the file's evidence record stands for it; "
        "without one the restore is refused.",
    )
    reuse_blob: bool = leaf(
        True, Flag(), doc="Keep using a restored blob of the same generation instead of rewriting it."
    )
    queue_depth: int = leaf(4, Span(1, 64), unit="requests", doc="Native I/O requests in flight; SGLang has 4 only.")
    chunk_bytes: int = leaf(
        64 * MIB,
        Span(PAGE_BYTES, None, PAGE_BYTES),
        unit="bytes",
        doc="Size of one native I/O request; SGLang has 256 MiB only.",
    )
    native_library: str | None = leaf(
        None,
        # "//x" and "/x/../y" name other files than they seem to; a digest is no help when the wrong file matches.
        Pattern(
            r"(?:/(?!\.{1,2}(?:/|$))[^/\x00-\x1f\x7f\ud800-\udfff]+)+",
            "an absolute path",
            "/opt/coldsnap/lib/libcoldsnap_io.so",
        ),
        doc="The native I/O library to load; unset: the packaged one.",
    )
    native_sha256: str | None = leaf(
        None,
        Pattern(r"[0-9a-f]{64}", "64 lowercase hexadecimal digits", "0123456789abcdef" * 4),
        doc="Digest that the native library must have; another digest is an error.",
    )
    image_compression: ImageCompression = leaf(
        "auto",
        OneOf(get_args(ImageCompression)),
        doc="lz4: pages in blocks of 256 KiB, acceleration 1, padded to pages. none: as CRIU wrote them. auto: the "
        "one that was measured to be faster for a hot and a cold restore together; of equally fast ones the smaller.",
    )
