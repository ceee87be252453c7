"""Scenarios of vLLM's sleep and wake-up over ColdSnap's backend, run by an interpreter that has vLLM.

    python sleep_scenarios.py DIRECTORY     →  one JSON object: scenario → what was seen

The worker is a small class with what the hooks look at; allocator, tables, backend factory and backend base are vLLM's.
"""

import json
import os
import sys
import threading
import traceback
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import torch
from cumem_stand_in import Device, Tagged, install, tensor_at
from safetensors.torch import load_file, save_file
from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory

from coldsnap.engines.vllm import worker as worker_module
from coldsnap.engines.vllm.hooks import register_sleep_backend
from coldsnap.engines.vllm.worker import Resident
from coldsnap.engines.weights.observe import LoadObserver
from coldsnap.transfer.safetensors import index

ROOT = Path(sys.argv[1])
MIB = 1 << 20
DEVICE = Device()
CUMEM = install(DEVICE)
os.environ.update(
    COLDSNAP_VLLM_OVERRIDE_CUMEM="1",
    COLDSNAP_DISCARD_REGIONS="kv_cache",
    COLDSNAP_EXPORT_MODEL_PAYLOAD="1",
    COLDSNAP_CAPTURE_BACKEND="python",
    COLDSNAP_HYDRATION_BACKEND="python",
)
register_sleep_backend()
NAMES = ("first", "second")


class Worker:
    """vLLM's worker, as far as the hooks look at it."""

    def __init__(self):
        self.model_config = types.SimpleNamespace(enable_cumem_allocator=True, sleep_mode_backend="cumem")
        self.device, self.rank = torch.device("cuda", DEVICE.ordinal), 0
        self.model_runner = types.SimpleNamespace(kv_caches=[])
        self.cache_config = types.SimpleNamespace(kv_cache_memory_bytes=None)
        self.requested_memory, self.peak_activation_memory, self.total_consumed = 100 * MIB, 5 * MIB, 30 * MIB
        self.model = None

    def get_model(self):
        return self.model

    def load_model(self, *, load_dummy_weights=False):
        allocator = CUMEM.CuMemAllocator.get_instance()
        with Tagged(allocator, "weights"):
            segments = [DEVICE.malloc(allocator, 6 * MIB), DEVICE.malloc(allocator, 4 * MIB)]
        model = torch.nn.Module()
        for number, (name, address) in enumerate(zip(NAMES, segments, strict=True)):
            layer = torch.nn.Module()
            weight = tensor_at(address + 512, (3 * MIB) // 2, torch.bfloat16).view(1024, -1)
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
            layer.register_buffer("scale", tensor_at(address + 3 * MIB + 4096, 1024, torch.float32))
            layer.scale.fill_(number + 0.5)
            model.add_module(name, layer)
        self.model = model
        parameters, stored = dict(model.named_parameters()), index([CHECKPOINT])
        with LoadObserver(model) as observer:
            for name, tensor in observer.bound(load_file(CHECKPOINT).items(), stored):
                parameters[name].data.copy_(tensor)
        self.record = observer.record

    def determine_available_memory(self):
        return 80 * MIB

    def initialize_from_config(self):
        allocator = CUMEM.CuMemAllocator.get_instance()
        with Tagged(allocator, "kv_cache"):
            cache, tables = DEVICE.malloc(allocator, 7 * MIB), DEVICE.malloc(allocator, MIB)
        self.model_runner.kv_caches.append(tensor_at(cache, 7 * MIB, torch.uint8).fill_(7))
        self.tables = tensor_at(tables, MIB, torch.uint8).fill_(9)
        self.beside = tensor_at(cache + 7 * MIB, 64, torch.uint8).fill_(3)

    def tensors(self):
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}


def checkpoint():
    """Write the weights that every worker loads."""
    path = ROOT / "model.safetensors"
    made = torch.Generator().manual_seed(7)
    save_file(
        {f"{name}.weight": torch.randn(1024, 1536, generator=made, dtype=torch.float32).bfloat16() for name in NAMES},
        path,
    )
    return str(path)


CHECKPOINT = checkpoint()


class World:
    """One worker, loaded through the hooks, and its backend made by vLLM's factory."""

    def __init__(self, name):
        table = CUMEM.CuMemAllocator.get_instance().pointer_to_data
        for address in list(table):
            if address in DEVICE.backed:
                DEVICE.unmap_and_release(*table[address].handle)
            del table[address]
        DEVICE.capacity, DEVICE.calls = 1 << 40, []
        self.directory = ROOT / name
        os.environ["COLDSNAP_DISK_SLEEP_DIR"] = str(self.directory)
        self.resident, self.log = Resident(), []
        module = types.SimpleNamespace(Worker=type("Worker", (Worker,), {}))
        self.resident.watch(module, settle=lambda model: self.worker.record.settle(model), log=self.log.append)
        self.worker = module.Worker()
        self.worker.load_model()
        self.worker.initialize_from_config()
        self.backend = SleepModeBackendFactory.create_backend(self.worker.model_config)
        self.backend.resident = self.resident
        self.table = table
        self.before = self.bytes()

    def bytes(self):
        return {
            name: bytes(tensor.contiguous().view(torch.uint8).numpy().data)
            for name, tensor in self.worker.tensors().items()
        }

    def asleep(self):
        return sorted(data.tag for data in self.table.values() if data.is_asleep)

    def kv(self):
        return bytes(self.worker.model_runner.kv_caches[0].numpy().data)

    def state(self):
        return self.resident.operations()["memory"]({})


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def sleeps_to_files_and_wakes():
    world = World("simple")
    rss = resident_bytes()
    world.backend.suspend(1)
    told = {
        "class": type(world.backend).__name__,
        "own": isinstance(world.backend, CuMemBackend),
        "freed_mib": (rss - resident_bytes()) // MIB,
        "asleep": world.asleep(),
        "state": [world.backend.state(), world.state()["state"]],
        "files": sorted(str(path.relative_to(world.directory)) for path in world.directory.rglob("*.json")),
        "packs": [path.stat().st_size for path in world.directory.rglob("*.pack")],
        "tables": int(world.worker.tables.sum()) // MIB,
    }
    world.backend.resume(None)
    return told | {
        "awake": world.asleep() == [] and [world.backend.state(), world.state()["state"]],
        "equal": world.bytes() == world.before,
        "kv_zero": world.kv() == bytes(7 * MIB),
        "beside": world.worker.beside.tolist() == [3] * 64,
        "log": world.log,
        "caches": world.state()["kv_caches"]["bytes"] // MIB,
    }


def wakes_by_tags():
    world = World("tags")
    world.backend.suspend(1)
    world.backend.resume(["weights"])
    first = [world.backend.state(), world.asleep(), world.bytes() == world.before]
    world.backend.resume(["kv_cache"])
    return {"first": first, "then": [world.backend.state(), world.asleep()], "kv_zero": world.kv() == bytes(7 * MIB)}


def sleeps_again_with_the_same_pack():
    world = World("again")
    for _ in range(2):
        world.backend.suspend(1)
        packs = list(world.directory.rglob("*.pack"))
        world.backend.resume(None)
    return {"packs": len(packs), "equal": world.bytes() == world.before}


def without_a_pack_the_residual_holds_everything():
    world = World("blob")
    os.environ["COLDSNAP_EXPORT_MODEL_PAYLOAD"] = "0"
    try:
        world.backend.suspend(1)
    finally:
        os.environ["COLDSNAP_EXPORT_MODEL_PAYLOAD"] = "1"
    blob = sum(path.stat().st_size for path in world.directory.rglob("weights.blob"))
    packs = list(world.directory.rglob("*.pack"))
    world.backend.resume(None)
    return {"blob_mib": blob // MIB, "packs": len(packs), "equal": world.bytes() == world.before}


def out_of_memory_in_a_wake_up():
    world = World("oom")
    world.backend.suspend(1)
    DEVICE.capacity = DEVICE.used + 7 * MIB
    DEVICE.calls.clear()
    told = refusal(lambda: world.backend.resume(None))
    failed = [world.backend.state(), world.state()["state"], world.asleep()]
    DEVICE.capacity = 1 << 40
    world.backend.resume(None)
    mapped = [address for call, address in DEVICE.calls if call == "map"]
    return {
        "told": told,
        "failed": failed,
        "awake": [world.backend.state(), world.state()["state"], world.asleep()],
        "equal": world.bytes() == world.before,
        "maps": sorted(mapped.count(address) for address in set(mapped)),
        "backed": len(DEVICE.backed) == len(world.table),
    }


def without_a_directory_nothing_is_given_away():
    world = World("none")
    del os.environ["COLDSNAP_DISK_SLEEP_DIR"]
    told = refusal(lambda: world.backend.suspend(1))
    return {
        "told": told,
        "asleep": world.asleep(),
        "state": world.backend.state(),
        "equal": world.bytes() == world.before,
    }


def level_two_is_vllms_own():
    world = World("two")
    world.backend.suspend(2)
    slept = [len(world.asleep()), world.state()["state"]]
    refused = refusal(lambda: world.resident.operations()["release"](request(world)))
    look = world.resident.when_mapped(lambda request: {"sum": float(world.worker.model.first.weight.sum())})
    looked = [refusal(lambda: look({}))]
    world.backend.resume(None)
    looked.append(refusal(lambda: look({})))
    files = len(list(ROOT.glob("two/**/*")))
    return {"slept": slept, "awake": world.asleep(), "files": files, "refused": refused, "looked": looked}


def the_rank_releases_on_a_thread_of_its_own():
    world = World("rank")
    replies = []

    def ask(name, body):
        thread = threading.Thread(target=lambda: replies.append(world.resident.operations()[name](body)))
        thread.start()
        thread.join()

    ask("release", request(world))
    asleep = world.asleep()
    ask("hydrate", {"op": "hydrate"})
    release, hydrate = replies
    return {
        "asleep": asleep,
        "pack": release["pack"]["bytes"] >= 6 * MIB,
        "kept": release["kept"],
        "worker": world.state()["worker"],
        "released": {tag: size // MIB for tag, size in release["released"].items()},
        "state": hydrate["state"],
        "bytes": {kind: size // MIB for kind, size in hydrate["bytes"].items()},
        "equal": world.bytes() == world.before,
        "beside": world.worker.beside.tolist() == [3] * 64,
    }


def both_ends_of_each_tensor_are_compared_after_a_recovery():
    world = World("ends")
    told = []
    for spoilt in (None, "second.scale"):
        identity = {"model_id": "example/two-layers", "revision": "a" * 40}
        sampled = {"model": identity, "recovery": "required", "verify_model_bytes": 32}
        world.resident.operations()["release"](request(world) | sampled)
        if spoilt:  # what is compared is what the model has then, whoever wrote it
            ends = world.resident.memory._ends
            world.resident.memory._ends = lambda size: {**ends(size), spoilt: "another"}  # noqa: B023
        wake = {"op": "hydrate", "provider": "recovery", "loader": {"verify_model_bytes": 32}}
        told.append(refusal(lambda: world.resident.operations()["hydrate"](wake)))  # noqa: B023
    return {
        "told": told,
        "compared": sorted(world.resident.memory._last.samples.digests),
        "failed": world.state()["state"],
        "equal": world.bytes() == world.before,
    }


def the_guard_caps_what_vllm_chose():
    world = World("guard")
    capped, log = world.worker.determine_available_memory(), world.log[-1]
    world.worker.total_consumed = 10 * MIB
    enough = world.worker.determine_available_memory()
    world.worker.total_consumed = 30 * MIB
    world.worker.cache_config.kv_cache_memory_bytes = 80 * MIB
    return {"mib": [size // MIB for size in (capped, enough, world.worker.determine_available_memory())], "log": log}


def a_process_without_a_worker_skips():
    empty = Resident()
    loading = World("loading").resident
    loading._loading = True
    return {
        "replies": [empty.operations()[name]({}) for name in ("release", "hydrate", "memory")],
        "loading": refusal(lambda: loading.operations()["memory"]({})),
    }


def a_worker_without_vllms_allocator_is_left_alone():
    resident = Resident()
    module = types.SimpleNamespace(Worker=type("Worker", (Worker,), {}))
    resident.watch(module, settle=None, log=lambda _: None)
    worker = module.Worker()
    worker.device = torch.device("cpu")
    worker.load_model()
    return {"memory": resident.memory is None, "global": worker_module.resident.memory is None}


def request(world):
    return {
        "op": "release",
        "worker": "worker-0",
        "directory": str(world.directory / "worker-0"),
        "store": str(world.directory / "store"),
        "capture_id": "test",
        "backend": "python",
    }


def refusal(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


SCENARIOS = (
    sleeps_to_files_and_wakes,
    wakes_by_tags,
    sleeps_again_with_the_same_pack,
    without_a_pack_the_residual_holds_everything,
    out_of_memory_in_a_wake_up,
    without_a_directory_nothing_is_given_away,
    level_two_is_vllms_own,
    the_rank_releases_on_a_thread_of_its_own,
    both_ends_of_each_tensor_are_compared_after_a_recovery,
    the_guard_caps_what_vllm_chose,
    a_process_without_a_worker_skips,
    a_worker_without_vllms_allocator_is_left_alone,
)


def main():
    seen = {}
    for scenario in SCENARIOS:
        try:
            seen[scenario.__name__] = scenario()
        except Exception:
            seen[scenario.__name__] = {"failed": traceback.format_exc()}
    print(json.dumps(seen))


main()
