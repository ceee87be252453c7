"""A real torch model in host memory goes to sleep and comes back; run by an interpreter that has torch.

python torch_sleep.py DIRECTORY NATIVE_LIBRARY BACKEND KV_BYTES     →  one JSON object: what was seen
"""

import gc
import hashlib
import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from coldsnap.artifact.extents import Allocation
from coldsnap.engines.weights.observe import LoadObserver
from coldsnap.engines.weights.split import split
from coldsnap.engines.weights.worker import WorkerMemory
from coldsnap.transfer.memory import HostMemory
from coldsnap.transfer.native import view_of
from coldsnap.transfer.safetensors import index

VOCABULARY, HIDDEN, LAYERS, HEADS = 512, 192, 3, 4
PADDING = 1000


class Pool:
    """Tensors in regions of a memory, one region for each module that asks, with padding between them."""

    def __init__(self, memory, tag):
        self.memory, self.tag = memory, tag

    def tensors(self, *shapes, dtype=torch.bfloat16):
        sizes = [torch.Size(shape).numel() * dtype.itemsize + PADDING for shape in shapes]
        region = self.memory.allocate(sum(sizes), tag=self.tag)
        at, made = region.address, []
        for shape, size in zip(shapes, sizes, strict=True):
            flat = torch.frombuffer(view_of(at, size - PADDING), dtype=dtype)
            made.append(flat.view(shape))
            at += size
        return made


def parameter(tensor, loader=None):
    made = nn.Parameter(tensor, requires_grad=False)
    if loader is not None:
        made.weight_loader = loader
    return made


def stacked(param, loaded, place):
    size = param.shape[0] // 3
    param.data.narrow(0, place * size, size).copy_(loaded)


class Layer(nn.Module):
    def __init__(self, pool):
        super().__init__()
        qkv, out, up, down, scale = pool.tensors(
            (3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN), (HIDDEN,)
        )
        self.qkv, self.out = parameter(qkv, stacked), parameter(out)
        self.up, self.down = parameter(up), parameter(down)
        self.register_buffer("scale", scale)  # made after the load: nothing of it is in the checkpoint

    def forward(self, x):
        query, key, value = (
            part.view(-1, HEADS, HIDDEN // HEADS).transpose(0, 1) for part in (x @ self.qkv.T).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + attended.transpose(0, 1).reshape(x.shape) @ self.out.T
        return x + functional.silu(functional.rms_norm(x, (HIDDEN,)) * self.scale @ self.up.T) @ self.down.T


class Model(nn.Module):
    def __init__(self, pool):
        super().__init__()
        (embed,) = pool.tensors((VOCABULARY, HIDDEN))
        self.embed = parameter(embed)
        self.layers = nn.ModuleList(Layer(pool) for _ in range(LAYERS))

    def forward(self, tokens):
        x = self.embed[tokens]
        for layer in self.layers:
            x = layer(x)
        return (x @ self.embed.T).float()

    def load_weights(self, weights):
        table = dict(self.named_parameters())
        for name, tensor in weights:
            head, _, last = name.rpartition(".")
            if last in ("q", "k", "v"):
                table[f"{head}.qkv"].weight_loader(table[f"{head}.qkv"], tensor, "qkv".index(last))
            else:
                table[name].data.copy_(tensor)
        for layer in self.layers:
            layer.scale.copy_(layer.qkv.float().abs().mean(dim=0) * 40)


def checkpoint(path):
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape):
        return (torch.randn(shape, generator=generator) * 0.05).to(torch.bfloat16)

    tensors = {"embed": tensor(VOCABULARY, HIDDEN)}
    for number in range(LAYERS):
        tensors |= {f"layers.{number}.{part}": tensor(HIDDEN, HIDDEN) for part in ("q", "k", "v", "out")}
        tensors[f"layers.{number}.up"] = tensor(4 * HIDDEN, HIDDEN)
        tensors[f"layers.{number}.down"] = tensor(HIDDEN, 4 * HIDDEN)
    save_file(tensors, path, metadata={"format": "pt"})


def weights_of(path):
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  not a mapping
            yield name, file.get_tensor(name)


def digests(model):
    every = dict(model.named_parameters()) | dict(model.named_buffers())
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()
        for name, tensor in sorted(every.items())
    }


def main(directory, library, backend, kv_bytes):
    path = directory / "model.safetensors"
    if not path.exists():
        checkpoint(path)
    memory = HostMemory()
    kv_cache = memory.allocate(kv_bytes, tag="kv_cache")
    model = Model(Pool(memory, "weights"))
    with LoadObserver(model) as observer:
        model.load_weights(observer.bound(weights_of(path), index([path])))
    memory.copy_from_host(kv_cache.address, memoryview(b"K" * kv_bytes))

    def splitting():
        settled = observer.record.settle(model)
        allocations = [
            Allocation(address=one.address, size=one.size_bytes, region=one.tag) for one in memory.regions("weights")
        ]
        return split(allocations, settled.written, settled.kept)

    worker = WorkerMemory(memory, split=splitting)
    tokens = torch.arange(64) * 7 % VOCABULARY
    before, digested, places = model(tokens), digests(model), [one.data_ptr() for one in model.parameters()]
    released = worker.release(
        {
            "worker": "worker-0",
            "directory": str(directory / f"artifact-{backend}-{kv_bytes}"),
            "store": str(directory / "store"),
            "capture_id": "capture-0001",
            "model": {"model_id": "tiny/torch", "revision": "b" * 40},
            "backend": backend,
            "native_library": library,
            "reserve_bytes": 0,
        }
    )
    gc.collect()
    asleep = bool(model.embed.view(torch.uint8).any()), worker.memory_status({})["regions"]
    woken = worker.hydrate({"backend": backend})
    after = model(tokens)
    return {
        "asleep_holds_bytes": asleep[0],
        "asleep_mapped": {tag: sizes["mapped_bytes"] for tag, sizes in asleep[1].items()},
        "released": released,
        "woken": woken,
        "same_logits": torch.equal(before, after),
        "telling_logits": len(set(before.argmax(-1).tolist())),
        "same_digests": digests(model) == digested,
        "same_places": [one.data_ptr() for one in model.parameters()] == places,
        "parameter_bytes": sum(one.nbytes for one in model.parameters()),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))))
