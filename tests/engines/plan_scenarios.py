"""vLLM's own startup plan under the rule of this library; run by an interpreter with vLLM, prints JSON."""

import json
import os
import sys
from types import SimpleNamespace

os.environ["VLLM_CACHE_ROOT"] = sys.argv[1]
os.environ["VLLM_ENABLE_STARTUP_PLAN"] = "1"
os.environ["VLLM_PLUGINS"] = ""

from coldsnap.engines.vllm.imports import after_import
from coldsnap.engines.vllm.startup_plan import STARTUP_PLAN, StartupPlan

MIB = 1 << 20
FREE, KV = 64 << 30, 8 << 30

plan, lines = StartupPlan(), []
after_import(STARTUP_PLAN, lambda module: plan.watch(module, log=lines.append))

import vllm.v1.worker.startup_plan as module  # noqa: E402  the hook must be there first


def worker(free, *, config="a", world_size=1):
    return SimpleNamespace(
        vllm_config=SimpleNamespace(compute_hash=lambda: config),
        rank=0,
        parallel_config=SimpleNamespace(world_size=world_size),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None),
        init_snapshot=SimpleNamespace(free_memory=free),
    )


def start(free, **options):
    made = worker(free, **options)
    module.maybe_apply_startup_plan(made)
    told = plan.operations()["startup"]({})
    return {"kv": made.cache_config.kv_cache_memory_bytes, **told}


results = {"before": start(FREE)}
for world_size in (1, 2):
    module.maybe_save_startup_plan(worker(FREE, world_size=world_size), KV)
results |= {
    "same": start(FREE),
    "more": start(FREE + MIB),
    "100 MiB less": start(FREE - 100 * MIB),
    "512 MiB less": start(FREE - 512 * MIB),
    "1 GiB less": start(FREE - 1024 * MIB),
    "another configuration": start(FREE, config="b"),
    "two workers, 100 MiB less": start(FREE - 100 * MIB, world_size=2),
    "two workers, same": start(FREE, world_size=2),
}
module.maybe_save_startup_plan(worker(FREE, config="small"), 50 * MIB)
results["a cache smaller than what is missing"] = start(FREE - 100 * MIB, config="small")
print(json.dumps({"results": results, "lines": lines}))
