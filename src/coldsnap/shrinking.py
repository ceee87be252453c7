"""The step of a capture that makes the process image smaller, and what a descriptor and a receipt say of it.

The one rule: it works on files that nobody reads yet, so a failure leaves the artifact uncommitted and the workload as
it was.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from attrs import evolve

from coldsnap import artifact as format9
from coldsnap.artifact.pageimage import SUFFIX
from coldsnap.drivers.page_images import Feed, ShrunkPages, shrink_pages
from coldsnap.outside import require_outside
from coldsnap.receipts import Receipt
from coldsnap.releasing import store_of
from coldsnap.session import Session
from coldsnap.steps import ShrinkPages, StageCapsule

__all__ = ["feed_of", "searchable", "shrink", "stored_pages"]


def shrink(session: Session, step: ShrinkPages) -> Receipt:
    """Leave zero pages out, compress what is left."""
    writer = session.need(session.writer, "an output")
    dumped = session.need(session.dumped, "a process image")
    capsule = writer.directory(f"capsule/{step.unit}")
    if step.compression != "none" and session.released:
        # Weights that did not leave are found by their bytes, which compressed pages do not show any more.
        require_outside(session, store_of(session), sorted(capsule.glob("images/pages-*")))
    session.shrunk = shrunk = shrink_pages(
        capsule,
        compression=step.compression,
        zero_pages=step.zero_pages,
        library=session.library,
        workers=step.workers or len(os.sched_getaffinity(0)),
    )
    session.dumped = evolve(dumped, image_bytes=shrunk.image_bytes)
    return Receipt(
        step=step.id,
        requested=session.plan.decision("io.image_compression").requested,
        effective=f"{step.compression}, {shrunk.raw_bytes / 1e6:,.1f} MB in {shrunk.stored_bytes / 1e6:,.1f} MB",
        reason=f"{shrunk.zero_bytes / 1e6:,.1f} MB of zero pages left out",
        bytes=shrunk.stored_bytes,
        details=shrunk.details,
    )


def searchable(files: Sequence[format9.FileRecord]) -> list[format9.FileRecord]:
    """Return the files in which weights can be looked for; compressed pages were looked through before."""
    return [file for file in files if not file.path.endswith(SUFFIX)]


def stored_pages(shrunk: ShrunkPages | None) -> format9.Pages:
    """Return what the descriptor says of the pages."""
    if shrunk is None:
        return format9.Pages()
    return format9.Pages(
        compression=shrunk.compression,
        raw_bytes=shrunk.raw_bytes,
        zero_bytes=shrunk.zero_bytes,
        stored_bytes=shrunk.stored_bytes,
    )


def feed_of(session: Session, step: StageCapsule) -> Feed:
    """Return how the pages reach CRIU."""
    return Feed(way="stream" if step.pages == "stream" else "rebuilt", workers=step.workers, library=session.library)
