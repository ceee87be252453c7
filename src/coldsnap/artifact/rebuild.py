"""A pack that is missing, written again from whoever still has its bytes.

The one rule: the digest is known before the first byte is written, so its lock is held throughout, and nothing gets the
name but what was written, read back and found to be it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from attrs import frozen

from coldsnap.artifact.admission import Admission, Request, decide, vouch
from coldsnap.artifact.durable import StagedFile, staged_file
from coldsnap.artifact.evidence import identity_of
from coldsnap.artifact.pack import Pack, PackEntry, Source, verify_extents, write_pack
from coldsnap.artifact.store import Store
from coldsnap.errors import IntegrityError

__all__ = ["Rebuilt", "rebuild_pack"]


@frozen(kw_only=True)
class Rebuilt:
    """A pack that is in the store now.

    Attributes:
        admission: Of the pack.
        new_bytes: What was written; 0 when it was there already.
    """

    admission: Admission
    new_bytes: int


def rebuild_pack(
    store: Store,
    sources: Sequence[Source],
    index: Sequence[PackEntry],
    *,
    sha256: str,
    size: int,
    phase: Callable[[str], None] = lambda _: None,
) -> Rebuilt:
    """Write a pack whose index is known, unless it is there already.

    Args:
        store: Where it belongs.
        sources: Its extents.
        index: One entry for each source, in their order.
        sha256: The digest of the whole.
        size: Its size, bytes.
        phase: Called with ``writing`` and ``verifying``, with the lock held.

    Raises:
        IntegrityError: The sources have other bytes, the medium gives back others, or what is there already is not the
            pack. Nothing was published.
        OSError: The medium is full or failed; nothing is left behind.
    """
    final = store.path(sha256)
    request = Request(path=str(final), expected_sha256=sha256, expected_bytes=size)
    with store.lock(sha256):
        store.mark_used(sha256)
        if os.path.lexists(final):
            return Rebuilt(admission=decide(request, index=index, lanes=store.lanes), new_bytes=0)
        with staged_file(store.directory, "rebuilt.pack", at=store.at) as staged:
            phase("writing")
            pack = write_pack(staged, sources, digests=[entry.sha256 for entry in index], lanes=store.lanes)
            _require_captured(pack, index, sha256, staged)
            phase("verifying")
            os.fsync(staged.stream.fileno())
            verify_extents(staged.stream.fileno(), pack.bytes, index, path=str(staged.path), lanes=store.lanes)
            verified = identity_of(os.fstat(staged.stream.fileno()))
            staged.publish(final)
        return Rebuilt(admission=vouch(request, verified, index=index, at=store.at), new_bytes=pack.bytes)


def _require_captured(pack: Pack, index: Sequence[PackEntry], sha256: str, staged: StagedFile) -> None:
    for found, wanted in zip(pack.entries, index, strict=True):
        if found.crc32 != wanted.crc32:
            raise IntegrityError(
                f"the bytes of the extent at {wanted.offset:#x} are not those of the capture",
                path=str(staged.path),
                expected=f"CRC-32 {wanted.crc32:08x}",
                actual=f"CRC-32 {found.crc32:08x}",
            )
    if pack.sha256 != sha256:
        raise IntegrityError(
            "the bytes are not those of the capture", path=str(staged.path), expected=sha256, actual=pack.sha256
        )
