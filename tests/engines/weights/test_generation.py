"""Generations of one store: packs are shared, nothing is half there, nothing is left in the process."""

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from attrs import evolve
from sleepers import PLAIN, SMALL, Layout, Worker, files, only, release_request, released, status

from coldsnap.artifact.manifest import NativeManifest, read_document
from coldsnap.engines.weights.generation import NATIVE_MANIFEST
from coldsnap.transfer.native import NativeLibrary
from threads import lasting_threads


def in_one_store(tmp_path, number):
    return {"directory": str(tmp_path / f"artifact-{number}"), "store": str(tmp_path / "store")}


@pytest.mark.parametrize("export", [True, False])
def test_a_second_capture_with_another_kv_cache_adds_no_pack_bytes(export, tmp_path):
    first, second = Worker(PLAIN), Worker(evolve(PLAIN, kv_cache=(3 << 20, 700)))

    one = released(first, tmp_path, export_model_payload=export, **in_one_store(tmp_path, 1))
    two = released(second, tmp_path, export_model_payload=export, **in_one_store(tmp_path, 2))
    for worker in (first, second):
        worker.worker.hydrate({})
        assert worker.is_whole()
        worker.close()

    if export:
        assert one["pack"] == {**two["pack"], "new_bytes": one["pack"]["bytes"]}
        assert two["pack"]["new_bytes"] == 0
        assert len(list(tmp_path.rglob("*.pack"))) == 1
    else:
        assert (one["pack"], two["pack"]) == (None, None)
        assert not (tmp_path / "store").exists()


def test_other_values_are_another_pack(tmp_path):
    first, second = Worker(PLAIN), Worker(evolve(PLAIN, seed=1))

    packs = {
        released(worker, tmp_path, **in_one_store(tmp_path, number))["pack"]["sha256"]
        for number, worker in enumerate((first, second))
    }

    assert len(packs) == 2
    first.close()
    second.close()


@pytest.mark.parametrize("reuse", [True, False])
def test_a_pack_whose_index_is_on_record_is_not_written_again(reuse, tmp_path):
    points = []
    worker = Worker(SMALL, at=points.append)
    released(worker, tmp_path)
    worker.worker.hydrate({})  # admits the pack together with its index
    points.clear()

    again = released(worker, tmp_path, reuse_blob=reuse)

    assert ("new.pack:write" in points) is not reuse
    assert again["pack"]["new_bytes"] == 0
    worker.worker.hydrate({})
    assert worker.is_whole()
    worker.close()


def test_a_pack_that_was_damaged_since_is_written_again_and_not_trusted(tmp_path):
    points = []
    worker = Worker(SMALL, at=points.append)
    released(worker, tmp_path)
    worker.worker.hydrate({})
    points.clear()
    only(tmp_path, "*.pack").write_bytes(b"x" * only(tmp_path, "*.pack").stat().st_size)

    released(worker, tmp_path)

    assert "new.pack:write" in points
    worker.close()


def test_each_release_replaces_the_generation_of_its_directory(tmp_path):
    worker = Worker(SMALL)
    first = released(worker, tmp_path)
    worker.worker.hydrate({})
    kept = files(tmp_path)
    changed = b"other bytes of the residual"
    worker.memory.copy_from_host(worker.weights[0].address + 12_000, memoryview(changed))

    second = released(worker, tmp_path)
    worker.worker.hydrate({})

    assert first["residual"] != second["residual"]
    assert first["pack"]["sha256"] == second["pack"]["sha256"]
    assert files(tmp_path) == kept
    assert changed in worker.bytes_of(worker.weights[0])
    worker.close()


def test_a_release_that_is_killed_anywhere_leaves_a_whole_generation_or_none(tmp_path):
    points = []
    counted = Worker(SMALL, at=points.append)
    whole = released(counted, tmp_path / "counted")
    counted.close()

    outcomes = set()
    for count in range(len(points) + 1):
        directory = tmp_path / str(count)
        assert killed(count, directory) == (count < len(points))
        outcomes.add(is_there(directory / "artifact" / "weights" / "worker-0", whole))

    assert outcomes == {True, False}


def killed(count, tmp_path):
    child = os.fork()
    if child == 0:
        remaining = [count]

        def at(_point):
            remaining[0] -= 1
            if remaining[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            Worker(SMALL, at=at).worker.release(release_request(tmp_path, backend="python"))
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def is_there(directory, whole):
    manifest = directory / NATIVE_MANIFEST
    if not manifest.exists():
        return False
    found = read_document(
        NativeManifest, manifest, sha256=f"sha256:{hashlib.sha256(manifest.read_bytes()).hexdigest()}"
    )
    residual = (directory / "weights.blob").read_bytes()
    assert found.residual.sha256 == f"sha256:{hashlib.sha256(residual).hexdigest()}" == whole["residual"]["sha256"]
    assert list(directory.parents[2].rglob(f"{found.pack.sha256[7:]}.pack"))
    return True


def test_two_hundred_cycles_leak_nothing(native_library, tmp_path):
    worker = Worker(SMALL)

    def cycle(turn):
        backend = ("python", "auto")[turn % 2]
        worker.worker.release(release_request(tmp_path, backend=backend, native_library=native_library))
        worker.worker.hydrate({"backend": backend, "native_library": native_library})

    for turn in range(20):
        cycle(turn)
    before = held()
    for turn in range(200):
        cycle(turn)
    after = held()

    assert worker.is_whole()
    assert (after["fds"], after["threads"]) == (before["fds"], before["threads"])
    assert after["maps"] - before["maps"] <= 5  # the allocator's arenas come and go
    assert after["private_bytes"] - before["private_bytes"] < 4 << 20
    assert NativeLibrary.load(native_library).statistics().ring_bytes == 0
    worker.close()


def held():
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": lasting_threads(),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "private_bytes": 1024 * int(rollup.split("Private_Dirty:")[1].split()[0]),
    }


SLEEPER = """
    import os, sys
    sys.path[:0] = {path!r}
    from sleepers import Layout, Worker, release_request
    from pathlib import Path
    from coldsnap.transfer.native import view_of

    SIZE = {size}
    worker = Worker(Layout(weights=(SIZE,), model=((0, 4096, SIZE // 2), (0, SIZE // 2 + 8192, 100_000))), fill=False)
    with open({content!r}, "rb", buffering=0) as stream:
        assert stream.readinto(view_of(worker.weights[0].address, SIZE)) == SIZE
    request = release_request(Path({tmp_path!r}), backend={backend!r}, native_library={library!r})
    for _ in range(2):
        worker.worker.release(request)
        print("asleep", flush=True)
        sys.stdin.readline()
        worker.worker.hydrate({{}})
        print("awake", flush=True)
        sys.stdin.readline()
"""


def anonymous_memory(pid):
    """Everything that a process image of it would have to hold."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, permissions, *_ = line.split()
            if permissions[0] != "r" or line.endswith(("[vvar]", "[vsyscall]", "[vvar_vclock]")):
                continue
            begin, end = (int(part, 16) for part in span.split("-"))
            memory.seek(begin)
            yield memory.read(end - begin)


@pytest.mark.parametrize("backend", ["python", "auto"])
def test_a_sleeping_process_holds_no_byte_of_its_weights(backend, native_library, tmp_path):
    size = 20 << 20
    content = os.urandom(size)
    (tmp_path / "content").write_bytes(content)
    samples = [content[at : at + 64] for at in range(5000, size - 64, size // 12)]
    script = textwrap.dedent(SLEEPER).format(
        path=[str(Path(__file__).parent)],
        size=size,
        content=str(tmp_path / "content"),
        tmp_path=str(tmp_path),
        backend=backend,
        library=native_library,
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:

        def found():
            everything = b"".join(anonymous_memory(child.pid))
            return [sample in everything for sample in samples]

        for _ in range(2):
            assert child.stdout.readline() == "asleep\n"
            assert not any(found())
            print(file=child.stdin, flush=True)
            assert child.stdout.readline() == "awake\n"
            assert all(found())
            print(file=child.stdin, flush=True)
        assert child.wait(30) == 0


def test_a_directory_of_its_own_is_made_private(tmp_path):
    worker = Worker(SMALL)

    released(worker, tmp_path)

    assert (tmp_path / "artifact" / "weights" / "worker-0").stat().st_mode & 0o777 == 0o700
    assert status(worker)["state"] == "sleeping"
    worker.close()


def test_what_nothing_lives_in_is_in_no_file_and_zero_afterwards(tmp_path):
    layout = Layout(weights=(40_000, 9_000), model=((0, 0, 8_192),), vacant=((0, 10_000, 20_000), (1, 0, 9_000)))
    worker = Worker(layout)

    told = released(worker, tmp_path)
    stored = only(tmp_path, "weights.blob").read_bytes()
    worker.worker.hydrate({})

    first, second = (worker.content[region] for region in worker.weights)
    assert "49,000 bytes in 2 allocations" in told["coverage"] and "29,000 in 2 extents" in told["coverage"]
    assert first[12_000:12_064] not in stored and second[:64] not in stored
    assert worker.bytes_of(worker.weights[0]) == first[:10_000] + bytes(20_000) + first[30_000:]
    assert worker.bytes_of(worker.weights[1]) == bytes(9_000)
    worker.close()


@pytest.mark.parametrize("export", [True, False])
def test_long_runs_of_zeros_are_in_no_file_unless_a_load_wrote_them(tmp_path, export):
    mib = 1 << 20
    worker = Worker(Layout(weights=(9 * mib,), model=((0, 0, 4 * mib),)))
    (region,) = worker.weights
    for offset, size in ((mib, mib), (5 * mib, 2 * mib), (8 * mib, 100_000)):  # the model's; long; short
        worker.memory.copy_from_host(region.address + offset, memoryview(bytes(size)))
    before = worker.bytes_of(region)

    released(worker, tmp_path, export_model_payload=export)
    residual = only(tmp_path, "weights.blob").stat().st_size
    worker.worker.hydrate({})

    assert worker.bytes_of(region) == before
    assert residual == (3 if export else 7) * mib
    worker.close()


def test_memory_that_is_all_zeros_needs_no_residual(tmp_path):
    worker = Worker(Layout(weights=(3 << 20,), model=()), fill=False)

    told = released(worker, tmp_path)
    worker.worker.hydrate({})

    assert told["residual"]["bytes"] == 0
    assert not any(worker.bytes_of(worker.weights[0]))
    worker.close()
