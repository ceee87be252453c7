"""A thousand transfers leave what one leaves, and memory stays within the ring."""

import os
from pathlib import Path

from layouts import Layout, content
from test_equality import delivered

from coldsnap.errors import NativeError
from coldsnap.transfer.backend import FileExtent, Tuning
from coldsnap.transfer.capture import capture, packed
from coldsnap.transfer.hydrate import hydrate
from threads import lasting_threads

SIZE = 256 << 10
TUNING = Tuning(chunk_bytes=65536, queue_depth=4, threads=2)


def held(shim, library):
    return {
        **shim.held(),
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": lasting_threads(),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "ring": library.statistics(),
    }


def test_a_thousand_hydrates_and_captures_leak_nothing(library, shim, device, tmp_path):
    path = tmp_path / "pack"
    path.write_bytes(content(SIZE))
    region = device.allocate(SIZE, tag="t")
    extents = [FileExtent(file_offset=0, address=region.address, length=SIZE)]
    sources = packed([(region.address, SIZE)], verification="crc32")

    def cycle(turn):
        backend = ("auto", "buffered", "direct")[turn % 3]
        access = "register" if backend == "buffered" and turn % 2 else "auto"
        tuning = Tuning(chunk_bytes=65536, queue_depth=4, threads=2, access=access)
        if turn % 5 == 4:
            shim.fail("cuMemcpyHtoDAsync", after=1)
            try:
                hydrate(path, extents, memory=device, library=library, backend=backend, tuning=tuning)
            except NativeError:
                pass
            shim.heal()
        else:
            hydrate(path, extents, memory=device, library=library, backend=backend, tuning=tuning)
        if turn % 10 == 0:
            capture(tmp_path / "again", sources, memory=device, library=library, tuning=TUNING)

    for turn in range(30):
        cycle(turn)
    before = held(shim, library)
    for turn in range(1000):
        cycle(turn)

    after = held(shim, library)
    assert abs(after.pop("maps") - before.pop("maps")) <= 5  # the allocator's arenas come and go
    assert after == before


def test_release_gives_the_ring_back(library, shim, device, tmp_path):
    path = tmp_path / "pack"
    path.write_bytes(content(SIZE))
    delivered(path, Layout(SIZE, ((0, SIZE),), (0,)), content(SIZE), device, library, "buffered", TUNING)
    assert library.statistics().registered_bytes > 0

    library.release()

    assert (library.statistics().ring_bytes, shim.counts()["registrations"]) == (0, 0)


def test_a_transfer_uses_no_more_memory_than_the_ring_and_64_mib(library, tmp_path, built):
    """In a process of its own, whose peak is not that of the tests before."""
    import subprocess
    import sys
    import textwrap

    size = 512 << 20
    path = tmp_path / "large"
    with path.open("wb") as stream:
        for _ in range(size >> 20):
            stream.write(content(1 << 20))
    script = f"""
        import os, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from native_build import ShimMemory
        from coldsnap.transfer.backend import FileExtent, Tuning
        from coldsnap.transfer.hydrate import hydrate
        from coldsnap.transfer.native import NativeLibrary, view_of
        library = NativeLibrary.load({str(built / "libcoldsnap_io.so")!r})
        library.load_cuda({str(built / "tests" / "libcuda_shim.so")!r})
        memory = ShimMemory()
        target = memory.allocate({64 << 20}, tag="t")
        # Zeroing gives pages back, and what arrives is to find them there.
        memory.copy_from_host(target.address, memoryview(bytearray({64 << 20})))
        def peak():
            return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) << 10
        extents = [FileExtent(file_offset=o, address=target.address, length={64 << 20}, crc32=None)
                   for o in range(0, {size}, {64 << 20})]
        for backend, access in (("buffered", "read"), ("buffered", "map"), ("direct", "auto")):
            for where in (memory, type(memory).__mro__[1]()):
                open("/proc/self/clear_refs", "w").write("5")
                before = peak()
                tuning = Tuning(chunk_bytes=1 << 20, queue_depth=32, threads=2, access=access)
                receipt = hydrate({str(path)!r}, extents, memory=where, library=library, backend=backend, tuning=tuning)
                assert peak() - before <= receipt.ring_bytes + {64 << 20}, (backend, access, where.device)
        print("kept")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "kept\n", done.stderr
