"""An engine with a torch model, once with a checkpoint and then without; run by an interpreter that has torch.

python fresh_engine.py export|start|release DIRECTORY JSON     →  one JSON object: what was done, and what it answers

Like an engine on a CPU it repacks its weights after the load, and derives from them what has no name.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from coldsnap.engines.weights.exporting import export
from coldsnap.engines.weights.fresh import StartRequest, start
from coldsnap.engines.weights.observe import LoadObserver
from coldsnap.engines.weights.requests import ReleaseRequest, read_request
from coldsnap.errors import ColdSnapError
from coldsnap.transfer.safetensors import index

HIDDEN, VOCABULARY, PADDED, LAYERS = 96, 250, 256, 2
RANK, RANKS = 1, 2


def parameter(*shape, loader=None, dtype=torch.bfloat16):
    made = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    if loader is not None:
        made.weight_loader = loader
    return made


def stacked(param, loaded, place):
    size = param.shape[0] // 3
    param.data.narrow(0, place * size, size).copy_(loaded)


def sharded(param, loaded):
    size = param.shape[1]
    param.data.copy_(loaded.narrow(1, RANK * size, size))


def padded(param, loaded):
    param[: loaded.shape[0]].data.copy_(loaded)
    param[loaded.shape[0] :].data.fill_(0)


def decay(param, loaded):
    param.data.copy_(-torch.exp(loaded.float()))


class Layer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.qkv = parameter(3 * hidden, hidden, loader=stacked)
        self.down = parameter(hidden, 4 * hidden // RANKS, loader=sharded)
        self.norm = parameter(hidden, dtype=torch.float32)  # converted
        self.decay = parameter(hidden, dtype=torch.float32, loader=decay)  # computed: not in the pack
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("angles", torch.arange(hidden, dtype=torch.float32), persistent=False)
        self.register_buffer("bias", torch.empty(hidden, dtype=torch.bfloat16), persistent=False)  # but loaded


class Model(nn.Module):
    def __init__(self, hidden=HIDDEN, layers=LAYERS, tied=True):
        super().__init__()
        self.embed = parameter(PADDED, hidden, loader=padded)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(layers))
        self.register_buffer("counts", torch.zeros(1 << 18))  # so long a run of zeros is in no file
        self.head = nn.Module()
        self.head.weight = self.embed if tied else parameter(PADDED, hidden, loader=padded)

    def load_weights(self, weights):
        table = dict(self.named_parameters()) | dict(self.named_buffers())
        for name, tensor in weights:
            head, _, last = name.rpartition(".")
            if last in ("q", "k", "v"):
                table[f"{head}.qkv"].weight_loader(table[f"{head}.qkv"], tensor, "qkv".index(last))
            elif hasattr(table[name], "weight_loader"):
                table[name].weight_loader(table[name], tensor)
            else:
                table[name].data.copy_(tensor)

    def post_process(self):
        """Repack, as an engine on a CPU does: nothing of what was loaded stays in its place."""
        for layer in self.layers:
            layer.sums = layer.qkv.float().sum(dim=1)
            packed = layer.qkv.t().contiguous().view(HIDDEN, 3, -1).transpose(0, 1).contiguous()
            layer.packed, layer.qkv = packed, None

    def forward(self, tokens):
        x = self.embed[tokens].float()
        for layer in self.layers:
            query, key, value = (x @ part.float() for part in layer.packed)
            x = x + torch.softmax(query @ key.T, -1) @ value * layer.norm * layer.scale + layer.bias.float()
            x = x + (layer.decay * layer.angles.cos() + layer.sums[:HIDDEN] + layer.down.float().sum(dim=1)) * 0.02
        return x @ self.head.weight.float().T + self.counts.sum()


def checkpoint(path):
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape, dtype=torch.bfloat16):
        return (torch.randn(shape, generator=generator) * 0.3).to(dtype)

    tensors = {"embed": tensor(VOCABULARY, HIDDEN)}
    for number in range(LAYERS):
        at = f"layers.{number}"
        tensors |= {f"{at}.{part}": tensor(HIDDEN, HIDDEN) for part in "qkv"}
        tensors |= {
            f"{at}.down": tensor(HIDDEN, 4 * HIDDEN),
            f"{at}.norm": tensor(HIDDEN),
            f"{at}.decay": tensor(HIDDEN),
        }
        tensors |= {f"{at}.bias": tensor(HIDDEN), f"{at}.scale": tensor(1, dtype=torch.float32).reshape(())}
    save_file(tensors, path, metadata={"format": "pt"})


def weights_of(path):
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  not a mapping
            yield name, file.get_tensor(name)


def answer(model):
    with torch.no_grad():
        logits = model(torch.arange(48) * 7 % VOCABULARY)
    return {"tokens": logits.argmax(-1).tolist(), "sum": logits.double().sum().item(), "last": logits[-1, :8].tolist()}


def loaded(path):
    model = Model()
    with LoadObserver(model) as observer:
        model.load_weights(observer.bound(weights_of(path), index([path])))
    return model, observer.record


def exported(directory, request):
    path = directory / "model.safetensors"
    checkpoint(path)
    model, record = loaded(path)
    report = export(model, record, read_request(ReleaseRequest, request))
    model.post_process()
    return {"report": report, "answer": answer(model), "embed_ends_with_zeros": not model.embed[VOCABULARY:].any()}


def started(_directory, requests):
    return {name: started_once(request) for name, request in requests.items()}


def started_once(request):
    options = request.pop("model", {})
    clutter = [torch.empty(1000 + 64 * number) for number in range(5)]  # other addresses, in another order
    model = Model(**options)
    for one in (*model.parameters(), *model.buffers()):
        if one is not model.layers[0].angles and one is not model.layers[-1].angles:
            one.data.fill_(3)
    try:
        report = start(model, read_request(StartRequest, request), worker="worker-0")
    except ColdSnapError as error:
        return {"refused": type(error).__name__, "why": str(error), "untouched": bool((model.embed == 3).all())}
    model.post_process()
    del clutter
    return {"report": report, "answer": answer(model)}


def released(directory, request):
    """Export what a load left, then release the same memory; both ways make a pack."""
    import torch_sleep  # noqa: PLC0415  it stands beside this

    from coldsnap.artifact.extents import Allocation  # noqa: PLC0415
    from coldsnap.engines.weights.split import split  # noqa: PLC0415
    from coldsnap.engines.weights.worker import WorkerMemory  # noqa: PLC0415
    from coldsnap.transfer.memory import HostMemory  # noqa: PLC0415

    path = directory / "sleeper.safetensors"
    torch_sleep.checkpoint(path)
    memory = HostMemory()
    model = torch_sleep.Model(torch_sleep.Pool(memory, "weights"))
    with LoadObserver(model) as observer:
        model.load_weights(observer.bound(torch_sleep.weights_of(path), index([path])))
    first = export(model, observer.record, read_request(ReleaseRequest, request))

    def splitting():
        settled = observer.record.settle(model)
        allocations = [
            Allocation(address=one.address, size=one.size_bytes, region=one.tag) for one in memory.regions("weights")
        ]
        return split(allocations, settled.written, settled.kept)

    there = {**request, "directory": f"{request['directory']}-released"}
    return {"export": first, "release": WorkerMemory(memory, split=splitting).release(there)}


if __name__ == "__main__":
    do = {"export": exported, "start": started, "release": released}[sys.argv[1]]
    print(json.dumps(do(Path(sys.argv[2]), json.loads(sys.argv[3]))))
