"""Small memories to put to sleep: strategies, and a worker over host memory whose bytes are known."""

import json
import random

from attrs import frozen
from hypothesis import strategies as st

from coldsnap.artifact.extents import Allocation
from coldsnap.engines.weights.copies import Copy, Placed, View
from coldsnap.engines.weights.split import Split, Written, split
from coldsnap.engines.weights.worker import WorkerMemory
from coldsnap.transfer.memory import HostMemory, Region
from coldsnap.transfer.safetensors import index as checkpoint_index

MODEL = {"model_id": "tiny/model", "revision": "a" * 40}


@frozen
class Layout:
    """Sizes of the allocations of weights, what of each is the model's (offset, size), and sizes of the KV cache."""

    weights: tuple[int, ...]
    model: tuple[tuple[int, int, int], ...]
    kv_cache: tuple[int, ...] = (8192,)
    seed: int = 0
    vacant: tuple[tuple[int, int, int], ...] = ()


PLAIN = Layout(
    weights=(3 << 20, 20_480, 5_000),
    model=((0, 0, 2 << 20), (0, (2 << 20) + 100, 4_096), (1, 8_192, 4_096), (1, 12_288, 3), (2, 1, 4_000)),
    kv_cache=(1 << 20, 4_097),
)


SMALL = Layout(weights=(20_000, 9_000), model=((0, 0, 8_192), (0, 10_000, 100), (1, 5, 8_000)), kv_cache=(5_000, 4_096))


@st.composite
def layouts(draw, *, most: int = 60_000) -> Layout:
    weights = draw(st.lists(st.integers(1, most), min_size=1, max_size=4))
    model = []
    for index, size in enumerate(weights):
        edges = sorted(draw(st.lists(st.integers(0, size), max_size=8, unique=True)))
        model += [(index, low, high - low) for low, high in zip(edges[::2], edges[1::2], strict=False)]
    kv_cache = draw(st.lists(st.integers(1, most), max_size=2))
    return Layout(tuple(weights), tuple(model), tuple(kv_cache), draw(st.integers(0, 9)))


class Worker:
    """Host memory with known bytes in it, and its worker."""

    def __init__(self, layout: Layout, memory: HostMemory | None = None, *, fill: bool = True, **options) -> None:
        self.layout = layout
        self.memory = memory or HostMemory()
        self.weights = [self.memory.allocate(size, tag="weights") for size in layout.weights]
        self.kv_cache = [self.memory.allocate(size, tag="kv_cache") for size in layout.kv_cache]
        generator = random.Random(layout.seed)
        self.content = {region: generator.randbytes(region.size_bytes) for region in self.weights if fill}
        for region, data in self.content.items():
            self.memory.copy_from_host(region.address, memoryview(data))
        for region in self.kv_cache:
            self.memory.copy_from_host(region.address, memoryview(b"K" * region.size_bytes))
        self.copies = ()
        self.worker = WorkerMemory(self.memory, split=self.split, **options)

    def loaded_from(self, path):
        """Write a checkpoint with every model byte, and remember the load of it that never was."""
        header, data, self.copies = {}, b"", []
        for index, offset, size in self.layout.model:
            name = f"model.{index}.{offset}"
            header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [len(data), len(data) + size]}
            data += self.content[self.weights[index]][offset : offset + size]
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        stored = checkpoint_index([path])
        for index, offset, size in self.layout.model:
            found = stored[f"model.{index}.{offset}"]
            view = View(dtype="U8", offset_bytes=0, shape=(size,), stride=(1,))
            copy = Copy(
                source_name=found.name,
                source_path=found.path,
                source_dtype="U8",
                source_shape=(size,),
                source_file_offset=found.file_offset,
                source_length=size,
                source_view=view,
                destination_name=f"layer.{index}.{offset}",
                destination_dtype="U8",
                destination_shape=(size,),
                destination_view=view,
                copy_bytes=size,
            )
            self.copies.append(Placed(copy=copy, base=self.weights[index].address + offset))
        return path

    def split(self) -> Split:
        allocations = [
            Allocation(address=region.address, size=region.size_bytes, region=region.tag) for region in self.weights
        ]
        written = [
            Written(
                address=self.weights[index].address + offset,
                size=size,
                semantic=f"layer.{index}.{offset}",
            )
            for index, offset, size in self.layout.model
        ]
        vacant = [(self.weights[index].address + offset, size) for index, offset, size in self.layout.vacant]
        return split(allocations, written, vacant=vacant, copies=self.copies)

    def bytes_of(self, region: Region) -> bytes:
        into = bytearray(region.size_bytes)
        self.memory.copy_to_host(region.address, memoryview(into))
        return bytes(into)

    def is_whole(self) -> bool:
        """Tell whether every byte of the weights is there, and whether none of the KV cache is left."""
        return all(self.bytes_of(region) == data for region, data in self.content.items())

    def is_forgotten(self) -> bool:
        return not any(any(self.bytes_of(region)) for region in self.kv_cache)

    def close(self) -> None:
        self.memory.close()


def release_request(tmp_path, **changes):
    return {
        "op": "release",
        "worker": "worker-0",
        "directory": str(tmp_path / "artifact" / "weights" / "worker-0"),
        "store": str(tmp_path / "store"),
        "capture_id": "capture-0001",
        "model": MODEL,
        "reserve_bytes": 0,
        **changes,
    }


def files(tmp_path):
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())


def status(worker):
    return worker.worker.memory_status({})


def released(worker, tmp_path, **changes):
    return worker.worker.release(release_request(tmp_path, backend="python", **changes))


def only(tmp_path, pattern):
    (found,) = tmp_path.rglob(pattern)
    return found
