"""Loads of small torch models under the observer, run by an interpreter that has torch; prints what was seen.

python load_scenarios.py DIRECTORY     →  one JSON object: scenario → what was seen
"""

import ctypes
import gc
import json
import sys
import threading
import traceback
import types
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from coldsnap.artifact import canonical, record
from coldsnap.artifact.extents import Allocation
from coldsnap.engines.vllm import loading
from coldsnap.engines.weights.copies import Copy
from coldsnap.engines.weights.observe import LoadObserver
from coldsnap.engines.weights.split import split
from coldsnap.engines.weights.storages import DTYPES
from coldsnap.errors import ContractError
from coldsnap.transfer.safetensors import index

DIRECTORY = Path(sys.argv[1])
SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


# A model as engines have them: merged projections, a sharded one, tied weights, padding, converted and derived values.

HIDDEN, HEADS, VOCABULARY, LAYERS, RANK, RANKS = 32, 4, 100, 2, 1, 2


def parameter(*shape, loader=None, dtype=torch.bfloat16, transposed=False):
    made = torch.full(shape[::-1] if transposed else shape, 7.0, dtype=dtype)
    made = nn.Parameter(made.t() if transposed else made, requires_grad=False)
    if loader is not None:
        made.weight_loader = loader
    return made


def stacked(param, loaded, place):
    size = param.shape[0] // 3
    param.data.narrow(0, place * size, size).copy_(loaded)


def side_by_side(param, loaded, place):
    size = param.shape[1] // 2
    param.data.narrow(1, place * size, size).copy_(loaded)


def sharded(param, loaded):
    size = param.shape[1]
    param.data.copy_(loaded.narrow(1, RANK * size, size))


def padded(param, loaded):
    param[: loaded.shape[0]].data.copy_(loaded)
    param[loaded.shape[0] :].data.fill_(0)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = parameter(3 * HIDDEN, HIDDEN, loader=stacked)
        self.gate_up = parameter(2 * HIDDEN, 2 * HIDDEN, loader=side_by_side, transposed=True)
        self.down = parameter(HIDDEN, 2 * HIDDEN // RANKS, loader=sharded)
        self.norm = parameter(HIDDEN, dtype=torch.float32)
        self.register_buffer("scale", torch.zeros(()))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = parameter(VOCABULARY + 28, HIDDEN, loader=padded)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Module()
        self.head.weight = self.embed
        self.register_buffer("angles", torch.arange(64, dtype=torch.float32))

    def load_weights(self, weights):
        table = dict(self.named_parameters()) | dict(self.named_buffers())
        for name, tensor in weights:
            name, place = stacked_name(name)
            target = table[name]
            if place is None:
                getattr(target, "weight_loader", default)(target, tensor)
            else:
                target.weight_loader(target, tensor, place)


def default(param, loaded):
    param.data.copy_(loaded.view(param.shape))


def stacked_name(name):
    head, _, last = name.rpartition(".")
    for merged, parts in (("qkv", ("q", "k", "v")), ("gate_up", ("gate", "up"))):
        if last in parts:
            return f"{head}.{merged}", parts.index(last)
    return name, None


def checkpoint(directory):
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, generator=generator).to(dtype)

    tensors = {"embed": tensor(VOCABULARY, HIDDEN)}
    for number in range(LAYERS):
        tensors |= {f"layers.{number}.{part}": tensor(HIDDEN, HIDDEN) for part in "qkv"}
        tensors |= {f"layers.{number}.{part}": tensor(2 * HIDDEN, HIDDEN) for part in ("gate", "up")}
        tensors[f"layers.{number}.down"] = tensor(HIDDEN, 2 * HIDDEN)
        tensors[f"layers.{number}.norm"] = tensor(HIDDEN)
        tensors[f"layers.{number}.scale"] = tensor(1, dtype=torch.float32)
    directory.mkdir(exist_ok=True)
    names = sorted(tensors)
    paths = [directory / f"model-{number}.safetensors" for number in (1, 2)]
    for path, part in zip(paths, (names[::2], names[1::2]), strict=True):
        save_file({name: tensors[name] for name in part}, path, metadata={"format": "pt"})
    return tensors, paths


def weights_of(paths):
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)


def loaded_model():
    tensors, paths = checkpoint(DIRECTORY / "whole")
    model = Model()
    with LoadObserver(model) as observer:
        model.load_weights(observer.bound(weights_of(paths), index(paths)))
    return tensors, model, observer.record


def memory(written):
    return ctypes.string_at(written.address, written.size)


def raw(tensor):
    return bytes(tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data)


def as_view(data, view):
    flat = torch.frombuffer(data, dtype=torch.uint8)[view.offset_bytes :]
    whole = flat[: flat.numel() // view.width * view.width].view(DTYPES[view.dtype])
    return whole.as_strided(view.shape, view.stride)


def replay(copies, sizes):
    """Do the copies again, from the files alone, into memory that is zero."""
    destinations = {name: bytearray(size) for name, size in sizes.items()}
    for copy in copies:
        with open(copy.source_path, "rb") as file:
            file.seek(copy.source_file_offset)
            source = bytearray(file.read(copy.source_length))
        as_view(destinations[copy.destination_name], copy.destination_view).copy_(as_view(source, copy.source_view))
    return destinations


@scenario
def a_whole_model():
    tensors, model, made = loaded_model()
    found = made.settle(model)
    parameters = dict(model.named_parameters()) | dict(model.named_buffers())
    sizes = {name: one.untyped_storage().nbytes() for name, one in parameters.items()}
    replayed = replay(made.copies, sizes)
    live = {name: ctypes.string_at(one.data_ptr(), sizes[name]) for name, one in parameters.items()}
    expected = {"embed": raw(tensors["embed"])}
    for number in range(LAYERS):
        at = f"layers.{number}"
        expected[f"{at}.qkv"] = raw(torch.cat([tensors[f"{at}.{part}"] for part in "qkv"]))
        expected[f"{at}.gate_up"] = raw(torch.cat([tensors[f"{at}.{part}"] for part in ("gate", "up")], dim=1).t())
        expected[f"{at}.down"] = raw(tensors[f"{at}.down"][:, HIDDEN:])
        expected[f"{at}.norm"] = raw(tensors[f"{at}.norm"].float())
        expected[f"{at}.scale"] = raw(tensors[f"{at}.scale"])
    return {
        "copies": len(made.copies),
        "tensors": len(tensors),
        "written": sorted(one.semantic for one in found.written),
        "expected": sorted(expected),
        "wrong": [one.semantic for one in found.written if memory(one) != expected[one.semantic]],
        "not_replayed": [name for name in expected if bytes(replayed[name]) != live[name]],
        "kept": found.kept,
        "unsupported": found.unsupported,
        "padding_is_written": any(
            one.size > len(expected["embed"]) for one in found.written if one.semantic == "embed"
        ),
        "sources": sorted({Path(one.source_path).name for one in made.copies}),
        "converted": sorted({(one.source_dtype, one.destination_dtype) for one in made.copies}),
    }


@scenario
def a_record_in_json():
    _, _, made = loaded_model()
    texts = [canonical.encode(record.write(copy)) for copy in made.copies]
    again = [record.read(Copy, canonical.decode(text, path="x", max_bytes=1 << 20), path="x") for text in texts]
    return {"same": again == list(made.copies)}


@scenario
def two_processes_share_a_pack():
    packs = []
    for filler in (0, 100_000):
        held = torch.empty(filler)
        _, model, made = loaded_model()
        storages = {
            one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.state_dict().values()
        }
        allocations = [Allocation(address=address, size=size) for address, size in storages.items()]
        divided = split(allocations, made.written(model), made.settle(model).kept)
        packs.append(sorted((divided.semantic_ids[one], one.size) for one in divided.model.extents))
        del held
    return {"same": packs[0] == packs[1], "extents": len(packs[0]), "residual": divided.residual.bytes}


@scenario
def a_model_in_a_model():
    _, model, made = loaded_model()
    outer = nn.Module()
    outer.language_model = nn.Module()
    outer.language_model.inner = model
    found = made.settle(outer)
    try:
        made.settle(nn.Module())
    except ContractError as error:
        refused = str(error)
    return {
        "names": sorted(one.semantic for one in found.written),
        "copies": sorted({one.destination_name for one in made.rebased(outer).copies}),
        "addresses": sorted(one.address for one in found.written) == sorted(one.address for one in made.written(model)),
        "refused": refused,
    }


@scenario
def loaders_are_put_back():
    model = Model()
    before = {name: getattr(one, "weight_loader", None) for name, one in model.named_parameters()}
    during = {}
    with LoadObserver(model):
        during = {name: getattr(one, "weight_loader", None) for name, one in model.named_parameters()}
        kept = model.layers[0].qkv.weight_loader
    after = {name: getattr(one, "weight_loader", None) for name, one in model.named_parameters()}
    kept(model.layers[0].qkv, torch.ones(HIDDEN, HIDDEN, dtype=torch.bfloat16), 1)
    try:
        with LoadObserver(model):
            raise KeyError("x")
    except KeyError:
        pass
    last = {name: getattr(one, "weight_loader", None) for name, one in model.named_parameters()}
    return {
        "wrapped": sorted(name for name in before if during[name] is not before[name]),
        "restored": before == after == last,
        "name": kept.__name__,
        "loads": float(model.layers[0].qkv[HIDDEN, 0]),
    }


# One destination, one odd loader.


class One(nn.Module):
    def __init__(self, *shape, dtype=torch.float32, loader=None):
        super().__init__()
        self.p = parameter(*shape, dtype=dtype, loader=loader)


def observed(model, load, *tensors, yielded=None, after=None):
    """Save tensors as w0, w1, …; load a model from them by ``load(model, w0, w1, …)``; tell what was seen."""
    path = DIRECTORY / "one.safetensors"
    save_file({f"w{number}": one for number, one in enumerate(tensors)}, path)
    with LoadObserver(model) as observer:
        stored = index([path])
        given = list(weights_of([path])) if yielded is None else yielded
        load(model, *[one for _, one in observer.bound(given, stored)])
    if after is not None:
        after(model)
    found = observer.record.settle(model)
    return {
        "unsupported": found.unsupported,
        "kept": found.kept,
        "written": [[one.semantic, one.offset, one.size] for one in found.written],
        "views": [[list(one.source_view.shape), list(one.destination_view.shape)] for one in observer.record.copies],
    }


def f32(*shape):
    return torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.float32).reshape(shape) + 1


def loads_by(loader, shape=(4, 4), dtype=torch.float32, source=None, **more):
    """A model whose one parameter is loaded by a loader of its own."""
    model = One(*shape, dtype=dtype, loader=loader)
    source = f32(4, 4) if source is None else source
    return observed(model, lambda model, *given: model.p.weight_loader(model.p, *given), source, **more)


@scenario
def reasons():
    def staged(p, w):
        p.data = torch.empty_like(p).copy_(w)

    def changed_source(p, w):
        w.mul_(2)
        p.data.copy_(w)

    def own_storage_twice(p, w):
        p.data.copy_(w)
        p.data = torch.empty_like(p)
        p.weight_loader(p, w)

    def once_more(p, w):
        if not getattr(p, "seen", False):
            p.seen = True
            own_storage_twice(p, w)
        else:
            p.data.copy_(w)

    def then_zero(p, w):
        p.data.copy_(w)
        p.data[:2].zero_()

    def then_add(p, w):
        p.data.copy_(w)
        p.data.add_(1)

    def beyond(p, w):
        p.data.copy_(w.as_strided((4, 4), (4, 1), 2))

    big = f32(8, 4)
    return {
        "mutation": loads_by(lambda p, w: p.data.add_(w)),
        "mutation_after_a_copy": loads_by(then_add),
        "zeros_after_a_copy": loads_by(then_zero),
        "out": loads_by(lambda p, w: torch.add(w, 0, out=p.data)),
        "index_put": loads_by(lambda p, w: p.data.index_copy_(0, torch.arange(4), w)),
        "converted_first": loads_by(lambda p, w: p.data.copy_(w.to(torch.float64))),
        "source_mutated": loads_by(changed_source),
        "broadcast": loads_by(lambda p, w: p.data.copy_(w[0])),
        "empty": loads_by(lambda p, w: p.data[4:].copy_(w[4:])),
        "staged": loads_by(staged),
        "replaced_in_load": loads_by(once_more),
        "number_out_of_nowhere": loads_by(lambda p, w: p.data.fill_(3)),
        "complex": loads_by(lambda p, w: p.data.copy_(w), dtype=torch.complex64),
        "other_type_than_the_header": loads_by(
            lambda p, w: p.data.copy_(w), yielded=[("w0", f32(4, 4).to(torch.float64))]
        ),
        "other_shape_than_the_header": loads_by(
            lambda p, w: p.data.copy_(w), yielded=[("w0", f32(4, 4))], source=f32(16)
        ),
        "not_in_the_header": loads_by(lambda p, w: p.data.copy_(w), yielded=[("other", f32(4, 4))]),
        "beyond_its_tensor": loads_by(beyond, yielded=[("w0", big[:4])]),
        "replaced_after": loads_by(
            lambda p, w: p.data.copy_(w), after=lambda model: setattr(model, "p", parameter(4, 4, dtype=torch.float32))
        ),
        "gone_after": loads_by(lambda p, w: p.data.copy_(w), after=lambda model: delattr(model, "p")),
        "changed_after": loads_by(lambda p, w: p.data.copy_(w), after=lambda model: model.p.data.mul_(2)),
        "stretches": loads_by(
            lambda p, w: p.data[:, 0].copy_(w), shape=(70_000, 2), source=torch.ones(70_000), dtype=torch.float32
        ),
    }


@scenario
def exact_loads():
    def zero_first(p, w):
        p.data.zero_()
        p.data.copy_(w)

    def by_number(p, w):
        p.data.fill_(w.item())

    def by_rows(p, w):
        for row in range(4):
            p.data[row] = w[row]

    def in_a_thread(p, w):
        thread = threading.Thread(target=lambda: p.weight_loader(p, w))
        thread.start()
        thread.join()

    def transposed_view(model):
        model.p = nn.Parameter(model.p.data.t(), requires_grad=False)

    threaded = One(4, 4, loader=lambda p, w: p.data.copy_(w))
    return {
        "zeros_before_a_copy": loads_by(zero_first),
        "a_number": loads_by(by_number, shape=(1,), source=f32()),
        "a_number_for_all": loads_by(by_number, shape=(3,), source=f32()),
        "a_number_in_a_tensor": loads_by(lambda p, w: p.data.__setitem__(slice(1, 2), w), shape=(3,), source=f32()),
        "one_element": loads_by(lambda p, w: p.data.copy_(w.view(())), shape=(), source=f32(1)),
        "row_by_row": loads_by(by_rows),
        "each": loads_by(lambda p, w: torch._foreach_copy_([p.data[:2], p.data[2:]], [w[:2], w[2:]])),
        "converted": loads_by(lambda p, w: p.data.copy_(w), dtype=torch.bfloat16),
        "as_bytes": loads_by(lambda p, w: p.data.view(torch.uint8).copy_(w.view(torch.uint8))),
        "a_column": loads_by(lambda p, w: p.data[:, 1:3].copy_(w[:, :2])),
        "twice": loads_by(lambda p, w: (p.data.copy_(w), p.data.copy_(w))),
        "transposed_afterwards": loads_by(lambda p, w: p.data.copy_(w), after=transposed_view),
        "in_a_thread": observed(threaded, lambda model, w: in_a_thread(model.p, w), f32(4, 4)),
        "without_a_loader": observed(One(4, 4), lambda model, w: model.p.data.copy_(w), f32(4, 4)),
        "nothing": observed(One(4, 4), lambda model, w: None, f32(4, 4)),
    }


@scenario
def destinations_that_share_memory():
    def views(*ranges, names="ab"):
        model, flat = nn.Module(), torch.zeros(16)
        for name, (begin, end) in zip(names, ranges, strict=True):
            setattr(model, name, nn.Parameter(flat[begin:end], requires_grad=False))
        model.flat = [flat]
        return model

    return {
        "same_bytes_first_name": observed(views((0, 16), (0, 16)), lambda model, w: model.b.data.copy_(w), f32(16)),
        "apart": observed(views((0, 8), (8, 16)), lambda model, w: model.b.data.copy_(w[:8]), f32(16)),
        "written_as_one": observed(views((0, 8), (8, 16)), lambda model, w: model.flat[0].copy_(w), f32(16)),
        "overlapping": observed(
            views((0, 10), (6, 16)),
            lambda model, w: (model.a.data.copy_(w[:10]), model.b.data.copy_(w[:10])),
            f32(16),
        ),
        "one_of_them_unsupported": observed(
            views((0, 10), (6, 16)),
            lambda model, w: (
                model.a.data.copy_(w[:10]),
                model.b.data.copy_(w[:10]),
                model.b.data[8:].add_(1),
            ),
            f32(16),
        ),
    }


@scenario
def memory_that_is_used_again_is_not_taken_for_a_source():
    path = DIRECTORY / "again.safetensors"
    save_file({f"w{number}": f32(64, 64) + number for number in range(20)}, path)
    model = nn.Module()
    for number in range(20):
        setattr(model, f"p{number}", parameter(64, 64, dtype=torch.float32))
    reused, seen = 0, set()
    with LoadObserver(model) as observer:
        for name, tensor in observer.bound(weights_of([path]), index([path])):
            address = tensor.data_ptr()
            made = tensor * 2
            del tensor
            gc.collect()
            reused += made.data_ptr() in seen
            seen |= {address, made.data_ptr()}
            getattr(model, f"p{name[1:]}").data.copy_(made)
    return {"copies": len(observer.record.copies), "reasons": sorted(set(observer.record.unsupported.values()))}


@scenario
def a_damaged_watch_ends_the_load():
    class Odd(torch.Tensor):
        @property
        def layout(self):
            raise KeyError("layout")

    model = One(4, 4)
    try:
        observed(model, lambda model, w: model.p.data.copy_(w.as_subclass(Odd)), f32(4, 4))
    except ContractError as error:
        return {"error": str(error)}
    return {}


# The hooks on vLLM's loader, with a stand-in of its outline.


def default_loader():
    """Return a module as vLLM's: iterators that take files, and a loader that hands one of them to the model."""
    module = types.ModuleType("default_loader")

    def iterator(hf_weights_files, use_tqdm_on_load, **more):
        yield from weights_of(hf_weights_files)

    class DefaultModelLoader:
        def __init__(self, files, iterator=loading.ITERATORS[0]):
            self.files, self.iterator = files, iterator

        def get_all_weights(self):
            source = getattr(module, self.iterator, None) or iterator
            return ((name, tensor) for name, tensor in source(self.files, use_tqdm_on_load=False))

        def load_weights(self, model, model_config):
            return model.load_weights(self.get_all_weights())

    for name in loading.ITERATORS:
        setattr(module, name, iterator)
    module.DefaultModelLoader = DefaultModelLoader
    return module


@scenario
def hooks_on_the_default_loader():
    loads, module = loading.VllmLoads(), default_loader()
    before = loads.loaded({})
    loads.watch(module)
    _, paths = checkpoint(DIRECTORY / "hooked")
    results = {"before": before}
    for name in (*loading.ITERATORS, "of another kind"):
        model = Model()
        module.DefaultModelLoader(paths, name).load_weights(model, None)
        outer = nn.Module()
        outer.inner = model
        results[name] = {
            **loads.loaded({}),
            "names": len([one for one in loads.settle(outer).written if one.semantic.startswith("inner.")]),
        }
        del model, outer
        gc.collect()
    results["gone"] = loads.loaded({})
    model = Model()
    module.DefaultModelLoader(paths).load_weights(model, None)
    for one in model.parameters():
        one.data.zero_()  # as memory is that sleeps
    results["asleep"] = loads.loaded({})
    results["changed"] = loads.settle(model).kept
    return results


@scenario
def loads_that_are_not_observed():
    loads, module = loading.VllmLoads(), default_loader()
    loads.watch(module)
    _, paths = checkpoint(DIRECTORY / "unobserved")
    model = Model()
    model.load_weights(module.DefaultModelLoader(paths).get_all_weights())  # a reload: no load_weights of the loader
    found = loads.settle(model)
    first, second = Model(), Model()
    for one in (first, second):
        module.DefaultModelLoader(paths).load_weights(one, None)
    return {
        "kept": found.kept,
        "bytes": sum(one.numel() * one.element_size() for one in (*model.parameters(), *model.buffers())),
        "two": loads.loaded({})["copies"],
        "loaders_are_back": first.layers[0].qkv.weight_loader is stacked,
    }


@scenario
def what_stands_in_the_way_of_the_hooks():
    loads, module = loading.VllmLoads(), default_loader()
    loads.watch(module)
    _, paths = checkpoint(DIRECTORY / "wrong")
    twice = paths[0].with_name("twice.safetensors")
    twice.write_bytes(paths[0].read_bytes())
    cut = paths[0].with_name("cut.safetensors")
    cut.write_bytes(paths[0].read_bytes()[:-1])

    def told(act):
        try:
            act()
        except ContractError as error:
            return str(error)
        return ""

    def load(*files):
        return lambda: module.DefaultModelLoader(files).load_weights(Model(), None)

    class Sealed(nn.Parameter):
        weight_loader = property(lambda self: default)

    sealed = nn.Module()
    sealed.p = Sealed(torch.zeros(1), requires_grad=False)
    return {
        "lacks": told(lambda: loading.VllmLoads().watch(types.ModuleType("default_loader"))),
        "twice": told(load(*paths, twice)),
        "cut": told(load(cut)),
        "absent": told(load(paths[0].with_name("absent.safetensors"))),
        "sealed": told(lambda: module.DefaultModelLoader(paths).load_weights(sealed, None)),
        "afterwards": told(load(*paths)),
    }


def main():
    results = {}
    for name, function in SCENARIOS.items():
        try:
            results[name] = function()
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
    print(json.dumps(results))


main()
