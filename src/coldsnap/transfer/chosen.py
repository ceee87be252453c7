"""What the ``io`` section of a policy means for transfers.

The one rule: the library is loaded, and held to its digest, only where a backend needs it.
"""

from __future__ import annotations

from attrs import frozen

from coldsnap.policy.io import IO
from coldsnap.transfer.backend import BackendName, Tuning
from coldsnap.transfer.capture import CaptureBackendName
from coldsnap.transfer.native import NativeLibrary

__all__ = ["Chosen", "choose"]


@frozen(kw_only=True)
class Chosen:
    """Arguments for :func:`~coldsnap.transfer.hydrate.hydrate` and :func:`~coldsnap.transfer.capture.capture`.

    Attributes:
        library: The native library, ``None`` when both backends are python.
        hydration_backend: ``io.hydration_backend``.
        capture_backend: ``io.capture_backend``.
        preverified: Whether ``io.verify_mode`` is preverified.
        tuning: ``io.queue_depth`` and ``io.chunk_bytes``.
    """

    library: NativeLibrary | None
    hydration_backend: BackendName
    capture_backend: CaptureBackendName
    preverified: bool
    tuning: Tuning


def choose(io: IO) -> Chosen:
    """Load what the policy names.

    Raises:
        NativeError: The library is absent, has another digest or another interface.
    """
    needed = (io.hydration_backend, io.capture_backend) != ("python", "python")
    return Chosen(
        library=NativeLibrary.load(io.native_library, sha256=io.native_sha256) if needed else None,
        hydration_backend=io.hydration_backend,
        capture_backend=io.capture_backend,
        preverified=io.verify_mode == "preverified",
        tuning=Tuning(queue_depth=io.queue_depth, chunk_bytes=io.chunk_bytes),
    )
