"""The io section of a policy becomes arguments, and its digest is held to."""

import hashlib

import pytest

from coldsnap.errors import NativeError
from coldsnap.policy import IO
from coldsnap.transfer.chosen import choose


def test_every_field_arrives(built):
    path = built / "libcoldsnap_io.so"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()

    chosen = choose(
        IO(
            hydration_backend="direct",
            capture_backend="buffered",
            verify_mode="preverified",
            queue_depth=7,
            chunk_bytes=8192,
            native_library=str(path),
            native_sha256=digest,
        )
    )

    assert chosen.library is not None
    assert chosen.library.path == path
    assert (chosen.hydration_backend, chosen.capture_backend, chosen.preverified) == ("direct", "buffered", True)
    assert (chosen.tuning.queue_depth, chosen.tuning.chunk_bytes) == (7, 8192)


def test_the_digest_of_the_policy_is_held_to(built):
    with pytest.raises(NativeError, match="io.native_sha256 expects"):
        choose(IO(native_library=str(built / "libcoldsnap_io.so"), native_sha256="0" * 64))


def test_python_needs_no_library():
    io = IO(hydration_backend="python", capture_backend="python", native_library="/absent/libcoldsnap_io.so")

    assert choose(io).library is None
