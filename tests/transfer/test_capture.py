"""A captured file is exactly the memory it came from, durable, and nothing when anything failed."""

import hashlib
import os
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import content

from coldsnap.errors import NativeError
from coldsnap.transfer.backend import FileExtent, Source, Tuning
from coldsnap.transfer.capture import capture, packed
from coldsnap.transfer.hydrate import hydrate

BACKENDS = ["python", "auto", "buffered", "direct"]
VERIFICATIONS = ["none", "crc32", "crc32+sha256"]


def filled(memory, length, seed=0):
    region = memory.allocate(max(length, 1), tag="t")
    memory.copy_from_host(region.address, memoryview(content(length, seed)))
    return region


@st.composite
def pieces(draw, aligned):
    found, offset = [], 0
    for _ in range(draw(st.integers(1, 8))):
        offset += draw(st.sampled_from([0, 4096, 81920] if aligned else [0, 1, 100, 4096, 70_001]))
        length = draw(st.one_of(st.integers(0, 50), st.integers(0, 200_000)))
        found.append((offset, length))
        offset += -(-length // 4096) * 4096 if aligned else length
    return found


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_backend_writes_the_same_file_and_digests(backend, where, data, library, host, device, tmp_path):
    memory = {"host": host, "device": device}[where]
    aligned = backend == "direct" or data.draw(st.booleans())
    layout = data.draw(pieces(aligned))
    verification = data.draw(st.sampled_from(VERIFICATIONS))
    pad = True if backend == "direct" else aligned and data.draw(st.booleans())
    tuning = Tuning(
        queue_depth=data.draw(st.integers(1, 5)),
        chunk_bytes=data.draw(st.sampled_from([4096, 16384, 1 << 20])),
        threads=data.draw(st.integers(0, 4)),
    )
    total = sum(length for _, length in layout)
    region = filled(memory, total)
    sources, at = [], 0
    for offset, length in layout:
        sources.append(
            Source(address=region.address + at, file_offset=offset, length=length, verification=verification)
        )
        at += length
    path = tmp_path / "captured"

    receipt = capture(
        path,
        sources,
        memory=memory,
        library=library,
        backend=backend,
        pad=pad,
        file_sha256=True,
        read_back=data.draw(st.booleans()),
        tuning=tuning,
    )

    expected = bytearray()
    at = 0
    for offset, length in layout:
        expected += bytes(offset - len(expected)) + content(total)[at : at + length]
        expected += bytes(-len(expected) % 4096 if pad else 0)
        at += length
    assert path.read_bytes() == expected
    assert receipt.file_bytes == len(expected)
    assert receipt.file_sha256 == hashlib.sha256(expected).digest()
    at = 0
    for digest, (_, length) in zip(receipt.digests, layout, strict=True):
        piece = content(total)[at : at + length]
        at += length
        assert digest.crc32 == (None if verification == "none" else zlib.crc32(piece))
        assert digest.sha256 == (hashlib.sha256(piece).digest() if verification == "crc32+sha256" else None)
    path.unlink()


def test_what_was_captured_hydrates_to_the_same_bytes(library, device, tmp_path):
    region = filled(device, 5_000_000)
    sources = packed(
        [(region.address, 1_000_001), (region.address + 1_000_001, 3_999_999)], verification="crc32+sha256"
    )

    receipt = capture(tmp_path / "pack", sources, memory=device, library=library)
    again = device.allocate(5_000_000, tag="again")
    extents = [
        FileExtent(
            file_offset=source.file_offset,
            address=again.address + source.address - region.address,
            length=source.length,
            crc32=digest.crc32,
            sha256=digest.sha256,
        )
        for source, digest in zip(sources, receipt.digests, strict=True)
    ]
    hydrate(tmp_path / "pack", extents, memory=device, library=library)

    found = memoryview(bytearray(5_000_000))
    device.copy_to_host(again.address, found)
    assert found == content(5_000_000)


def test_explicit_direct_refuses_an_unaligned_layout_and_auto_says_why_it_did_not(library, host, tmp_path):
    region = filled(host, 10_000)
    sources = [Source(address=region.address, file_offset=100, length=5000)]

    with pytest.raises(NativeError, match="extent 0 is not aligned"):
        capture(tmp_path / "x", sources, memory=host, library=library, backend="direct")
    receipt = capture(tmp_path / "x", sources, memory=host, library=library)

    assert (receipt.requested, receipt.effective, receipt.reason) == ("auto", "buffered", "layout-not-aligned")


def test_auto_takes_direct_for_an_aligned_layout(library, host, tmp_path):
    region = filled(host, 1 << 20)

    receipt = capture(
        tmp_path / "x", packed([(region.address, 1 << 20)], verification="none"), memory=host, library=library
    )

    if receipt.filesystem.kind == "memory":
        assert receipt.reason == "no-direct-open"
    else:
        assert (receipt.effective, receipt.reason) == ("direct", "requested")


@pytest.mark.parametrize("backend", ["python", "auto"])
def test_overlapping_sources_are_refused(backend, library, host, tmp_path):
    region = filled(host, 10_000)
    sources = [Source(address=region.address, file_offset=0, length=5000)] * 2

    with pytest.raises(NativeError, match="extent 1 starts before the end of the one before it"):
        capture(tmp_path / "x", sources, memory=host, library=library, backend=backend)

    assert os.listdir(tmp_path) == []


def test_an_older_file_stays_until_the_new_one_is_complete(library, host, tmp_path):
    path = tmp_path / "pack"
    path.write_bytes(b"older")
    region = filled(host, 10_000)

    with pytest.raises(NativeError):
        capture(
            path,
            [Source(address=region.address, file_offset=1, length=10_000)],
            memory=host,
            library=library,
            backend="direct",
        )

    assert path.read_bytes() == b"older"
    assert os.listdir(tmp_path) == ["pack"]
