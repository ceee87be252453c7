"""A torch model that converts, shards, stacks and overwrites while it loads, recovered in every way: run with torch.

python recovery_scenarios.py DIRECTORY NATIVE_LIBRARY     →  one JSON object: what was seen
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from coldsnap.artifact.extents import Allocation
from coldsnap.engines.weights.digests import ends_of
from coldsnap.engines.weights.observe import LoadObserver
from coldsnap.engines.weights.split import split
from coldsnap.engines.weights.worker import WorkerMemory
from coldsnap.errors import ColdSnapError
from coldsnap.transfer.memory import HostMemory
from coldsnap.transfer.native import view_of
from coldsnap.transfer.safetensors import index

SHAPES = {
    "plain": ((64, 96), torch.bfloat16),
    "converted": ((64, 96), torch.bfloat16),  # float32 in the file
    "eighth": ((64, 96), torch.float8_e4m3fn),  # bfloat16 in the file
    "transposed": ((96, 64), torch.float32),
    "sharded": ((64, 48), torch.float32),  # half of the columns of the file
    "columns": ((64, 96), torch.float32),  # two tensors side by side: the destination is strided
    "experts": ((4, 32, 24), torch.float32),  # stacked, two tensors for each
    "scale": ((96,), torch.float32),  # one number, for all elements
    "twice": ((64, 96), torch.float32),  # a whole copy, then a part of it again
    "derived": ((96,), torch.float32),
}


def checkpoint(path):
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(dtype)

    tensors = {
        "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),  # so that what follows is not aligned to much
        "plain": tensor(64, 96, dtype=torch.bfloat16),
        "converted": tensor(64, 96),
        "eighth": tensor(64, 96, dtype=torch.bfloat16),
        "transposed": tensor(64, 96),
        "sharded": tensor(64, 96),
        "left": tensor(64, 40),
        "right": tensor(64, 56),
        **{f"experts.{number}.{part}": tensor(16, 24) for number in range(4) for part in ("gate", "up")},
        "scale": tensor(1),
        "twice": tensor(64, 96),
        "again": tensor(8, 96),
    }
    save_file(tensors, path, metadata={"format": "pt"})


class Model(nn.Module):
    def __init__(self, memory):
        super().__init__()
        for name, (shape, dtype) in SHAPES.items():
            size = torch.Size(shape).numel() * dtype.itemsize
            region = memory.allocate(size + 100, tag="weights")
            tensor = torch.frombuffer(view_of(region.address, size), dtype=dtype).view(shape)
            if name == "derived":
                self.register_buffer(name, tensor)
            else:
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def load_weights(self, weights):
        own = {name: parameter.data for name, parameter in self.named_parameters()}
        for name, tensor in weights:
            head, *rest = name.split(".")
            if name in ("plain", "converted", "eighth", "twice"):
                own[name].copy_(tensor)
            elif name == "transposed":
                own[name].copy_(tensor.t())
            elif name == "sharded":
                own[name].copy_(tensor.narrow(1, 48, 48))
            elif name in ("left", "right"):
                own["columns"].narrow(1, 0 if name == "left" else 40, tensor.shape[1]).copy_(tensor)
            elif head == "experts":
                own[head][int(rest[0])].narrow(0, 0 if rest[1] == "gate" else 16, 16).copy_(tensor)
            elif name == "scale":
                own[name].copy_(tensor.view(()))
        self.overwrite(weights.again)
        self.derived.copy_(self.plain.float().abs().mean(dim=0))

    def overwrite(self, again):
        self.twice.data[16:24].copy_(again)


class Weights:
    """An iterator that keeps one tensor for the end."""

    def __init__(self, path, observer):
        self._bound = observer.bound(self._read(path), index([path]))
        self.again = None

    @staticmethod
    def _read(path):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                yield name, file.get_tensor(name)

    def __iter__(self):
        for name, tensor in self._bound:
            if name == "again":
                self.again = tensor
            else:
                yield name, tensor


class Loaded:
    """A model in memory that can be released, loaded from a checkpoint."""

    def __init__(self, path):
        self.memory = HostMemory()
        self.model = Model(self.memory)
        with LoadObserver(self.model) as observer:
            self.model.load_weights(Weights(path, observer))
        self.record = observer.record
        self.worker = WorkerMemory(self.memory, split=self.split, ends=self.ends)
        self.spoilt = ""

    def ends(self, size):
        if self.spoilt:
            getattr(self.model, self.spoilt).data.view(torch.uint8)[0, 0] ^= 1
        return ends_of(self.model, size)

    def split(self):
        settled = self.record.settle(self.model)
        regions = self.memory.regions("weights")
        allocations = [Allocation(address=one.address, size=one.size_bytes, region=one.tag) for one in regions]
        return split(allocations, settled.written, settled.kept, copies=settled.copies, derived=settled.derived)

    def digest(self):
        return hashlib.sha256(b"".join(bytes(self.memory.buffer(one)) for one in self.memory.regions())).hexdigest()

    def release(self, directory, library, **more):
        request = {
            "worker": "worker-0",
            "directory": str(directory / "artifact"),
            "store": str(directory / "store"),
            "capture_id": "capture-0001",
            "model": {"model_id": "tiny/torch", "revision": "b" * 40},
            "native_library": library,
            "backend": "buffered",
            "reserve_bytes": 0,
            "recovery": "required",
        }
        return self.worker.release(request | more)

    def recover(self, **loader):
        return self.worker.hydrate({"provider": "recovery", "loader": loader})


def refused(attempt):
    try:
        attempt()
    except ColdSnapError as error:
        return str(error)
    return ""


def main(directory, library):
    path = directory / "model.safetensors"
    checkpoint(path)
    loaded = Loaded(path)
    before = loaded.digest()
    result = {"settled": sorted(loaded.record.unsupported), "recovered": {}}
    small = {"staging_bytes": 4096, "verify_bytes": 8}
    for backend in ("auto", "direct", "buffered", "mmap", "torch"):
        for name, more in {"large": {}, "small": small}.items():
            told = loaded.release(directory, library)
            woken = loaded.recover(backend=backend, **more)
            receipt = woken["receipts"]["checkpoint"]
            result["recovered"][f"{backend} {name}"] = {"same": loaded.digest() == before, **receipt}
    result["recorded"] = told["recovery"]

    loaded.release(directory, library, verify_model_bytes=64)
    result["sampled"] = loaded.recover(verify_model_bytes=64)["state"]
    loaded.release(directory, library, verify_model_bytes=64)
    loaded.spoilt = "converted"
    result["other model"] = refused(lambda: loaded.recover(verify_model_bytes=64))
    loaded.spoilt = ""
    loaded.recover()

    result["flipped"] = {}
    for name in ("plain", "converted", "again", "twice", "scale", "right"):
        loaded.release(directory, library)
        stored = index([path])[name]
        data = path.read_bytes()
        at = stored.file_offset + stored.length - 1  # sign and exponent, in every type here
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
        result["flipped"][name] = refused(loaded.recover)
        path.write_bytes(data)
        loaded.recover()
    result["whole after all"] = loaded.digest() == before
    result["too much derived"] = refused(
        lambda: loaded.release(directory, library, derived_buffer_max_bytes=96 * 4 - 1)
    )
    return result


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
