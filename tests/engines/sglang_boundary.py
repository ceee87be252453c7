"""SGLang's boundary as far as it is ours: a manager that moves tags, and ranks that are threads."""

import sys
import threading
import types

import attrs

from coldsnap.engines.sglang.boundary import Boundary
from coldsnap.engines.sglang.live import Live
from coldsnap.engines.sglang.worker import Resident
from coldsnap.engines.weights.split import Written
from coldsnap.engines.weights.worker import Hooks
from coldsnap.transfer.memory import HostMemory

messages = types.ModuleType("outline_of_io_struct")
sys.modules[messages.__name__] = messages


@attrs.define
class Request:
    tags: object = None


class Done:
    """What SGLang answers."""


Request.__module__ = messages.__name__
messages.ReleaseMemoryOccupationReqOutput = messages.ResumeMemoryOccupationReqOutput = Done


class Gone(BaseException):
    """The process would have ended."""


@attrs.define(eq=False)
class Load:
    written: tuple
    kept: dict
    copies: tuple = ()
    derived: dict = attrs.Factory(dict)


class Group:
    """Ranks that are threads; all must say something before one hears it."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.said = {}

    def exchange(self, rank):
        def say(value):
            self.said[rank] = value
            self.barrier.wait()
            values = [self.said[one] for one in range(self.size)]
            self.barrier.wait()
            return values

        return say


class Manager:
    """What SGLang's manager does to memory, in its own words."""

    def __init__(self, memory):
        self.memory = memory
        self.offload_tags = set()
        self.scheduler = None
        self.idle = True
        self.calls = []

    def is_fully_idle(self):
        return self.idle

    def release(self, request):
        assert self.idle
        self.calls.append(("release", *request.tags))
        self.offload_tags.update(request.tags)
        for tag in request.tags:
            self.memory.release(self.memory.regions(tag))

    def resume(self, request):
        self.calls.append(("resume", *request.tags))
        for tag in request.tags:
            self.offload_tags.remove(tag)
            self.memory.remap(self.memory.regions(tag))


class Device(HostMemory):
    """Memory like a device's: what comes back holds what somebody else left there."""

    def remap(self, regions):
        released = [region for region in regions if not self.is_mapped(region)]
        super().remap(released)
        for region in released:
            self.buffer(region)[:] = b"\xa5" * region.size_bytes


class Rank:
    """One scheduler: weights of 3 pages, a KV cache of 2."""

    def __init__(self, tmp_path, *, rank=0, group=None, environ=None, memory=None, weights_bytes=12288):
        self.memory = memory or HostMemory()
        self.weights = self.memory.allocate(weights_bytes, tag="weights")
        self.kv = self.memory.allocate(8192, tag="kv_cache")
        self.memory.buffer(self.weights)[:12288] = bytes((rank + n * 7) % 251 for n in range(12288))
        self.manager, self.steps, self.gone = Manager(self.memory), [], []
        self.root = tmp_path / f"rank-{rank}"
        group = group or Group(1)
        self.resident = Resident(meet=self.meet, settle=self.settle)
        self.boundary = Boundary(
            self.resident,
            Live(self.resident, dict, environ or {"COLDSNAP_LIVE_BACKING": "discard"}),
            exchange=lambda _: group.exchange(rank),
            before=lambda: self.steps.append("before"),
            leave=lambda: self.steps.append("leave"),
            enter=lambda: self.steps.append("enter"),
            after=lambda: self.steps.append("after"),
            abort=self.abort,
        )
        self.resident.add_model("model", draft=False, path="/models/target")
        self.resident.settle_in(
            self.memory,
            rank=rank,
            pause=self.boundary.pause,
            resume=self.boundary.resume_tags,
            hooks=Hooks(before_release=self.resident.require_mapped),
        )

    def abort(self, error):
        raise Gone(str(error)) from error

    def settle(self, _model):
        address = self.weights.address
        return Load((Written(address=address, size=8192, semantic="layer.weight"),), {})

    def bytes(self):
        return bytes(self.memory.buffer(self.weights))

    # SGLang's requests

    def meet(self, kind, _worker):
        self.ask(kind)

    def ask(self, kind, tags=None):
        original = {"release": Manager.release, "resume": Manager.resume}[kind]
        hook = {"release": self.boundary.release, "resume": self.boundary.resume}[kind]
        assert isinstance(hook(original, self.manager, Request(tags)), Done)
        return self.resident.last_error

    # Operations

    def release(self, **more):
        request = {
            "op": "release",
            "worker": self.resident.name,
            "directory": str(self.root / "generation"),
            "store": str(self.root / "store"),
            "capture_id": "capture-1",
            "backend": "python",
            "reserve_bytes": 0,
            **more,
        }
        return self.resident.operations()["release"](request)

    def hydrate(self, **more):
        return self.resident.operations()["hydrate"]({"op": "hydrate", **more})
