"""The vLLM worker of this process: its memory as something that can be released and hydrated.

vLLM makes its worker long after the plugin was loaded, in the engine core's process when there is one worker on a GPU,
in processes of their own else. So the hooks are put on the class as soon as its module is imported, and the operations
answer that they were skipped where no worker with releasable memory ever came.

Operations arrive on a thread of the rank, while the worker's own thread waits for the next step of a paused scheduler.
CUDA's primary context belongs to the process, so that any thread may use it once it has named the device; torch's
allocator and vLLM's table are not touched by a thread that waits.

The one rule: a release is done only between steps; who asks for it has quiesced the engine.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coldsnap.artifact.extents import Allocation
from coldsnap.engines.rank import Busy, Operation
from coldsnap.engines.vllm import kv_guard
from coldsnap.engines.vllm.allocator import KV_CACHE, WEIGHTS, CumemMemory
from coldsnap.engines.vllm.kv_payload import KvStorage, Remnants, storages_of
from coldsnap.engines.weights.settled import Settled
from coldsnap.engines.weights.split import Split, split
from coldsnap.engines.weights.worker import Hooks, WorkerMemory

__all__ = ["Resident", "Settle", "Settled", "resident"]

Reply = Mapping[str, Any]
Log = Callable[[str], None]


Settle = Callable[[Any], Settled]


class Resident:
    """The worker that lives here, once it does.

    Attributes:
        memory: Its memory; ``None`` where there is none that can be released.
    """

    memory: WorkerMemory | None = None

    def __init__(self) -> None:
        self._worker: Any = None
        self._loaded: Any = None  # the worker, on whatever device, once its model is there
        self._cumem: CumemMemory | None = None
        self._loading = False
        self._remnants = Remnants()
        self._lock = threading.Lock()  # one operation at a time, whoever asks: a rank's thread or vLLM's own

    @property
    def rank(self) -> int:
        """Return the worker's number among all of its engine."""
        return int(self._worker.rank) if self._worker is not None else 0

    def model(self) -> Any:
        """Return the model that was loaded, on whatever device; None before."""
        return None if self._loaded is None else self._loaded.get_model()

    def watch(self, module: Any, *, settle: Settle, log: Log) -> None:
        """Put the hooks on vLLM's worker class.

        Args:
            module: ``vllm.v1.worker.gpu_worker``.
            settle: Says what a model's load wrote.
            log: Takes one sentence.
        """
        worker_class = module.Worker
        load_model = worker_class.load_model

        @functools.wraps(load_model)
        def loading(worker: Any, *args: Any, **kwargs: Any) -> Any:
            releasable = bool(worker.model_config.enable_cumem_allocator) and worker.device.type == "cuda"
            self._loading = releasable
            try:
                result = load_model(worker, *args, **kwargs)
                self._loaded = worker
                if releasable:
                    self.settle_in(worker, settle=settle)
                    log(f"worker {worker.rank} has releasable memory on {worker.device}")
            finally:
                self._loading = False
            return result

        worker_class.load_model = loading
        if kv_guard.is_on():
            kv_guard.guard(worker_class, log=log, free_bytes=_free_bytes)

    def settle_in(self, worker: Any, *, settle: Settle, memory: CumemMemory | None = None) -> None:
        """Take a worker whose model was just loaded.

        Args:
            worker: vLLM's ``Worker``.
            settle: Says what the load of its model wrote.
            memory: Its memory; vLLM's allocator when not given.
        """
        self._worker = self._loaded = worker
        self._cumem = memory or CumemMemory.of_process(device=worker.device.index, storages=self._storages)
        self.memory = WorkerMemory(
            self._cumem,
            split=lambda: self._split(settle),
            ends=self._ends,
            hooks=Hooks(before_release=self._before_release, after_hydrate=self._after_hydrate),
        )

    def operations(self) -> Mapping[str, Operation]:
        """Return what a rank answers for its worker."""
        return {
            "release": lambda request: self._do("release", request),
            "hydrate": lambda request: self._do("hydrate", request),
            "memory": lambda request: self._do("memory", request),
            "materialize": self._materialize,
        }

    def _materialize(self, request: Mapping[str, Any]) -> Reply:
        if self.memory is None:
            return {"skipped": True}
        with self._lock:
            self._require_mapped()
        # Outside of the lock: the engine serves on meanwhile, and whoever asks how it is must not wait for a pack.
        return self.memory.materialize(request)

    def settle(self) -> None:
        """Wait for the end of a pack that is being written, before vLLM takes the memory away by itself."""
        if self.memory is not None:
            self.memory.settle()

    def when_mapped(self, operation: Operation) -> Operation:
        """Return an operation that looks at the weights, refused while they have no backing.

        A kernel that reads there would end the CUDA context, and with it the engine.
        """

        def guarded(request: Mapping[str, Any]) -> Reply:
            with self._lock:
                self._require_mapped()
                return operation(request)

        return guarded

    def _require_mapped(self) -> None:
        if self._cumem is None:
            return
        if any(not self._cumem.is_mapped(region) for region in self._cumem.regions(WEIGHTS)):
            raise Busy("the weights of this worker sleep; wake the engine first")

    def _do(self, name: str, request: Mapping[str, Any]) -> Reply:
        if self._loading:
            raise Busy("the worker is still loading its model")
        if self.memory is None:
            return {"skipped": True}
        with self._lock:
            reply = self.memory.operations()[name](request)
        if name != "memory":
            return reply
        # Before its first release a worker has not been told its name; its number is one that all of them agree on.
        worker = reply["worker"] or f"worker-{self.rank}"
        return {**reply, "worker": worker, "kv_caches": _described(self._storages())}

    def _storages(self) -> tuple[KvStorage, ...]:
        # Before the cache is made the list is empty, and the second runner has none.
        return storages_of(getattr(self._worker.model_runner, "kv_caches", None) or ())

    def _split(self, settle: Settle) -> Split:
        cumem = self._memory()
        settled = settle(self._worker.get_model())
        allocations = [
            Allocation(address=one.address, size=one.size_bytes, region=one.tag, device=cumem.device)
            for one in cumem.regions(WEIGHTS)
        ]
        return split(
            allocations,
            settled.written,
            settled.kept,
            cumem.vacant(WEIGHTS),
            copies=settled.copies,
            derived=settled.derived,
        )

    def _ends(self, most_bytes: int) -> Mapping[str, str]:
        from coldsnap.engines.weights.digests import ends_of  # noqa: PLC0415  torch is there once a model is

        return ends_of(self._worker.get_model(), most_bytes)

    def _before_release(self) -> None:
        self._require_mapped()  # a sleep of vLLM's own, that is: of one that was made here it is known
        cumem = self._memory()
        cumem.settle()
        mapped = [region for region in cumem.regions(KV_CACHE) if cumem.is_mapped(region)]
        self._remnants.keep(cumem, mapped, self._storages())

    def _after_hydrate(self, tags: Sequence[str]) -> None:
        # Nothing else: vLLM repairs quantisation scales and block tables after its own wake-up, because its own sleep
        # throws them away. Here the scales came back with the weights, and the tables never left.
        if KV_CACHE in tags:
            self._remnants.put_back(self._memory())

    def _memory(self) -> CumemMemory:
        if self._cumem is None:
            raise Busy("no model was loaded yet")
        return self._cumem


resident = Resident()
"""The one of this process; a second worker cannot be, since vLLM's allocator takes only one."""


def _described(storages: Sequence[KvStorage]) -> Reply:
    # Which tensors the cache was found in; a list of all might not fit into a reply.
    return {
        "count": len(storages),
        "bytes": sum(one.size_bytes for one in storages),
        "first": [[one.index, one.address, one.size_bytes] for one in storages[:8]],
    }


def _free_bytes() -> int:
    import torch  # noqa: PLC0415  only the engine's environment has it

    return int(torch.accelerator.get_memory_info()[0])
