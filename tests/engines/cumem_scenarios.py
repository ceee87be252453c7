"""Scenarios of the allocator, run by an interpreter that has vLLM; each prints what it saw.

python cumem_scenarios.py     →  one JSON object: scenario → what was seen
"""

import json
import sys
import threading
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import torch
from cumem_stand_in import GRANULARITY, Device, Tagged, install, tensor_at

from coldsnap.engines.vllm.allocator import CumemMemory
from coldsnap.engines.vllm.kv_payload import REMNANT_LIMIT_BYTES, Remnants, storages_of
from coldsnap.errors import NativeError

MIB = 1 << 20
DEVICE = Device()
CUMEM = install(DEVICE)


class World:
    """An allocator with some weights and a KV cache in it."""

    def __init__(self):
        self.free()
        self.allocator = CUMEM.CuMemAllocator.get_instance()
        with Tagged(self.allocator, "weights"):
            self.weights = [DEVICE.malloc(self.allocator, size * MIB) for size in (4, 6, 2)]
        with Tagged(self.allocator, "kv_cache"):
            self.kv = DEVICE.malloc(self.allocator, 11 * MIB)
            self.tables = DEVICE.malloc(self.allocator, 1 * MIB)
        with Tagged(self.allocator, "cudagraph"):
            self.graph = DEVICE.malloc(self.allocator, 2 * MIB)
        for number, address in enumerate((*self.weights, self.kv, self.tables, self.graph)):
            tensor_at(address, self.size(address), torch.uint8).random_(generator=torch.Generator().manual_seed(number))
        self.kv_caches = [tensor_at(self.kv, 11 * MIB // 2, torch.bfloat16)]
        self.memory = CumemMemory(
            CUMEM, device=DEVICE.ordinal, torch=torch, storages=lambda: storages_of(self.kv_caches)
        )
        self.regions = self.memory.regions()

    @staticmethod
    def free():
        table = CUMEM.CuMemAllocator.get_instance().pointer_to_data
        for address in list(table):
            if address in DEVICE.backed:
                DEVICE.unmap_and_release(*table[address].handle)
            del table[address]
        DEVICE.capacity, DEVICE.calls = 1 << 40, []

    def size(self, address):
        return self.allocator.pointer_to_data[address].handle[1]

    def bytes_of(self, *addresses):
        return [bytes(tensor_at(address, self.size(address), torch.uint8).numpy().data) for address in addresses]

    def asleep(self):
        return {address for address, data in self.allocator.pointer_to_data.items() if data.is_asleep}


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def release_and_remap():
    world = World()
    usage, before = world.allocator.get_current_usage(), world.bytes_of(*world.weights)
    others, rss = world.bytes_of(world.tables, world.graph), resident()
    world.memory.release(world.regions)
    world.memory.release(world.regions)
    freed = rss - resident()
    asleep, usage_asleep = world.asleep(), world.allocator.get_current_usage()
    world.memory.remap(world.regions)
    zero = all(data == bytes(len(data)) for data in world.bytes_of(*world.weights, world.kv))
    for address, data in zip(world.weights, before, strict=True):
        world.memory.copy_from_host(address, memoryview(data))
    return {
        "listed": [[region.tag, region.size_bytes // MIB] for region in world.regions],
        "freed_mib": freed // MIB,
        "asleep": asleep == {*world.weights, world.kv},
        "usage": [usage // MIB, usage_asleep // MIB],
        "zero": zero,
        "equal": world.bytes_of(*world.weights) == before,
        "others_untouched": world.bytes_of(world.tables, world.graph) == others,
        "awake": world.asleep() == set(),
    }


def what_no_tensor_lives_in():
    world = World()
    first, second, _ = world.weights
    states = ("active_allocated", "inactive", "active_awaiting_free", "inactive")
    blocks, at = [], first
    for state, size in zip(states, (MIB, MIB // 2, MIB, MIB + MIB // 2), strict=True):
        blocks.append({"address": at, "size": size, "state": state})
        at += size
    DEVICE.blocks = {first: blocks, world.kv: [{"address": world.kv, "size": MIB, "state": "inactive"}]}
    found = world.memory.vacant("weights")
    DEVICE.blocks = {}
    return {"found": [[address - first, size] for address, size in found], "without": world.memory.vacant("weights")}


def vllm_itself_goes_on_afterwards():
    world = World()
    before = world.bytes_of(*world.weights)
    world.memory.release(world.regions)
    world.memory.remap(world.regions)
    for address, data in zip(world.weights, before, strict=True):
        world.memory.copy_from_host(address, memoryview(data))
    world.allocator.sleep(offload_tags=("weights", "runtime", "cudagraph"))
    slept = len(world.asleep())
    world.allocator.wake_up(None)
    return {"slept": slept, "awake": not world.asleep(), "equal": world.bytes_of(*world.weights) == before}


def vllm_wakes_what_was_released():
    world = World()
    world.memory.release(world.regions)
    world.allocator.wake_up(["weights"])
    mapped = [world.memory.is_mapped(region) for region in world.regions]
    DEVICE.calls.clear()
    world.memory.remap(world.regions)
    return {"mapped": mapped, "then_mapped": len(DEVICE.calls), "awake": not world.asleep()}


def a_copy_of_vllm_is_not_overwritten():
    world = World()
    world.allocator.sleep(offload_tags=("weights",))
    return {"told": refusal(lambda: world.memory.remap(world.memory.regions("weights"))), "asleep": len(world.asleep())}


def out_of_memory_in_the_middle():
    world = World()
    world.memory.release(world.regions)
    DEVICE.calls.clear()
    DEVICE.capacity = DEVICE.used + 11 * MIB
    told = refusal(lambda: world.memory.remap(world.regions))
    mapped = [world.memory.is_mapped(region) for region in world.regions]
    DEVICE.capacity = 1 << 40
    world.memory.remap(world.regions)
    maps = [address for call, address in DEVICE.calls if call == "map"]
    return {
        "told": told,
        "mapped": mapped,
        "awake": not world.asleep(),
        "mapped_once": [maps.count(region.address) for region in world.regions],
        "backed": [region.address in DEVICE.backed for region in world.regions],
    }


def a_mapping_that_fails_last_is_undone():
    world = World()
    world.memory.release(world.regions)
    DEVICE.fail_access = 2  # the attempt and the one after the cleaning
    told = refusal(lambda: world.memory.remap(world.regions))
    backed = [region.address in DEVICE.backed for region in world.regions]
    world.memory.remap(world.regions)
    return {"told": told, "backed": backed, "awake": not world.asleep()}


def what_has_no_backing_is_not_touched():
    world = World()
    world.memory.release(world.regions)
    buffer, address = memoryview(bytearray(64)), world.weights[0]
    return {
        "read": refusal(lambda: world.memory.copy_to_host(address, buffer)),
        "write": refusal(lambda: world.memory.copy_from_host(address, buffer)),
        "outside": refusal(lambda: world.memory.copy_to_host(address - GRANULARITY // 2, buffer)),
    }


def an_allocation_that_went_is_told():
    world = World()
    world.memory.release(world.regions)
    world.allocator.pointer_to_data.pop(world.weights[1])
    return {"told": refusal(lambda: world.memory.remap(world.regions)), "mapped": len(DEVICE.backed)}


def a_thread_of_its_own_uses_the_right_device():
    world = World()
    seen = []

    def request():
        world.memory.release(world.regions)
        world.memory.remap(world.regions)
        seen.append(DEVICE.thread.current)

    thread = threading.Thread(target=request)
    thread.start()
    thread.join()
    return {"devices": seen, "ordinal": DEVICE.ordinal}


def what_lies_beside_the_cache_comes_back():
    world = World()
    world.kv_caches = [
        [tensor_at(world.kv + 4096, MIB, torch.uint8), tensor_at(world.kv + 2 * MIB, 8 * MIB, torch.uint8)]
    ]
    storages = storages_of(world.kv_caches)
    before, remnants = world.bytes_of(world.kv)[0], Remnants()
    regions = world.memory.regions("kv_cache")
    remnants.keep(world.memory, regions, storages)
    kept = remnants.kept_bytes
    world.memory.release(regions)
    world.memory.remap(regions)
    remnants.put_back(world.memory)
    after = world.bytes_of(world.kv)[0]
    cache = [(4096, 4096 + MIB), (2 * MIB, 10 * MIB)]
    beside = [(0, 4096), (4096 + MIB, 2 * MIB), (10 * MIB, 12 * MIB)]
    return {
        "storages": [[one.index, one.address - world.kv, one.size_bytes] for one in storages],
        "kept": kept,
        "expected": sum(end - begin for begin, end in beside),
        "beside_equal": all(after[begin:end] == before[begin:end] for begin, end in beside),
        "cache_zero": all(after[begin:end] == bytes(end - begin) for begin, end in cache),
        "held_after": remnants.kept_bytes,
    }


def an_allocation_with_much_beside_the_cache_is_kept():
    world = World()
    with Tagged(world.allocator, "kv_cache"):
        shared = DEVICE.malloc(world.allocator, REMNANT_LIMIT_BYTES + 4 * MIB)
    world.kv_caches = [tensor_at(shared, 2 * MIB, torch.uint8)]
    return {"listed": len(world.memory.regions("kv_cache"))}


def refusal(action):
    try:
        action()
    except NativeError as error:
        return str(error)
    return None


def main():
    seen = {}
    for name, scenario in list(globals().items()):
        if getattr(scenario, "__module__", "") == "__main__" and callable(scenario) and name not in NOT_SCENARIOS:
            try:
                seen[name] = scenario()
            except Exception:
                seen[name] = {"failed": traceback.format_exc()}
    print(json.dumps(seen))


NOT_SCENARIOS = {"World", "resident", "refusal", "main"}

if __name__ == "__main__":
    main()
