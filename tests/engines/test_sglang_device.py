"""Graphs and communicators, with stand-ins that write down what is done to them: this runs on no GPU."""

import subprocess
import types
from pathlib import Path

import pytest

from coldsnap.engines.sglang.graphs import Graphs
from coldsnap.engines.sglang.nccl import Communicators
from coldsnap.engines.sglang.saver import SaverMemory
from coldsnap.errors import NativeError, UnsupportedError


class Recorder:
    """Writes down every call, of itself and of what it made."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, *args))


class Runner:
    """SGLang's model runner: two graphs of decoding, one of prefill."""

    def __init__(self, calls, decode=2, prefill=1):
        self.calls, self.eager_runner = calls, object()
        self.decode_cuda_graph_runner = self.graphs("decode", decode) or self.eager_runner
        self.prefill_cuda_graph_runner = self.graphs("prefill", prefill)

    def graphs(self, phase, count):
        if not count:
            return None
        graph = lambda n: types.SimpleNamespace(reset=lambda: self.calls.append(("reset", phase, n)))  # noqa: E731
        backend = types.SimpleNamespace(
            _graphs={n: graph(n) for n in range(count)}, cleanup=lambda: self.calls.append(("cleanup", phase))
        )
        return types.SimpleNamespace(backend=backend)

    def init_decode_cuda_graph(self):
        self.calls.append(("capture", "decode"))

    def init_prefill_cuda_graph(self):
        self.calls.append(("capture", "prefill"))


def graphs(device, workers=2, **runners):
    return Graphs(runners=lambda: runners, workers=lambda: workers, device=device)


def test_graphs_are_destroyed_with_their_pool_and_captured_again():
    device = Recorder()
    runner = Runner(device.calls)
    found = graphs(device, target=runner)
    found.require_replaceable()
    found.discard()
    assert device.calls == [
        ("synchronize",),
        ("reset", "decode", 0),
        ("reset", "decode", 1),
        ("cleanup", "decode"),
        ("reset", "prefill", 0),
        ("cleanup", "prefill"),
        ("synchronize",),
        ("forget_pool",),
        ("collect",),
    ]
    assert runner.decode_cuda_graph_runner is None
    device.calls.clear()
    found.capture()
    found.capture()
    assert device.calls == [("capture", "decode"), ("capture", "prefill")]


def test_a_server_of_one_worker_keeps_its_graphs():
    device = Recorder()
    runner = Runner(device.calls)
    found = graphs(device, workers=1, target=runner, draft=Runner(device.calls))
    found.require_replaceable()
    found.discard()
    assert device.calls == []
    assert runner.decode_cuda_graph_runner is not None


def test_a_server_without_graphs_has_nothing_to_do():
    device = Recorder()
    found = graphs(device, target=Runner(device.calls, decode=0, prefill=0))
    found.discard()
    found.capture()
    assert device.calls == []


def test_graphs_of_a_draft_model_are_refused_before_anything_happens():
    device = Recorder()
    found = graphs(device, target=Runner(device.calls), draft=Runner(device.calls))
    with pytest.raises(UnsupportedError, match="graphs of draft"):
        found.require_replaceable()
    assert device.calls == []


class Own:
    """SGLang's communicator."""

    def __init__(self, group, device):
        self.group, self.device, self.available, self.comm = group, device, True, f"comm-{group}"
        self.disabled = False
        self.nccl = types.SimpleNamespace(ncclCommDestroy=lambda comm: self.calls.append(("end", comm)))
        Own.calls.append(("begin", group))


@pytest.fixture
def transport():
    Own.calls = []
    found = Recorder()
    found.calls = Own.calls
    found.make = lambda ranks: Own.calls.append(("make", tuple(ranks))) or f"new-{len(ranks)}"
    return found


def group(name, ranks, own=True, disabled=True):
    made = Own(name, "cuda:0") if own else None
    if made:
        made.disabled = disabled
    return types.SimpleNamespace(ranks=ranks, pynccl_comm=made, device_group=f"torch-{name}")


def test_communicators_end_and_begin_in_one_order(transport):
    groups = [group("tp", [0, 1]), group("alone", [0], own=False), group("pp", [0, 2], own=False)]
    transport.calls.clear()
    found = Communicators(groups=lambda: groups, transport=transport)
    found.prepare()
    found.prepare()
    assert transport.calls == [("synchronize",), ("end", "comm-tp"), ("destroy", "torch-tp"), ("destroy", "torch-pp")]
    transport.calls.clear()
    found.restore()
    found.restore()
    assert transport.calls == [("make", (0, 1)), ("begin", "tp"), ("make", (0, 2))]
    assert groups[0].device_group == "new-2"
    assert groups[0].pynccl_comm.disabled is True
    assert groups[1].device_group == "torch-alone"


def test_a_single_worker_has_no_communicator_to_end(transport):
    found = Communicators(groups=lambda: [group("tp", [0], own=False)], transport=transport)
    found.prepare()
    found.restore()
    assert transport.calls == []


# The memory saver's allocations


def segment(address, size, pool, *blocks, device=0):
    found = [{"address": address + at, "size": length, "state": state} for at, length, state in blocks]
    return {"address": address, "total_size": size, "segment_pool_id": pool, "device": device, "blocks": found}


@pytest.fixture
def saver():
    """torch_memory_saver with two pools, and torch with their segments and one of its own."""
    segments = [
        segment(0x9000, 0x1000, (0, 1), (0, 0x400, "active_allocated"), (0x400, 0xC00, "inactive")),
        segment(0x4000, 0x2000, (0, 1), (0, 0x2000, "active_allocated")),
        segment(0x1000, 0x1000, (0, 2), (0, 0x1000, "active_allocated")),
        segment(0xF000, 0x1000, (0, 0), (0, 0x1000, "inactive")),
        segment(0xA000, 0x1000, (0, 1), device=1),
    ]
    cuda = types.SimpleNamespace(current_device=lambda: 0, memory_snapshot=lambda: list(segments))
    pools = {
        ("weights", False): types.SimpleNamespace(id=(0, 1)),
        ("kv_cache", False): types.SimpleNamespace(id=(0, 2)),
    }
    asleep = set()
    memory = SaverMemory(
        types.SimpleNamespace(_impl=types.SimpleNamespace(_mem_pools=pools)),
        asleep=lambda: asleep,
        torch=types.SimpleNamespace(cuda=cuda),
    )
    return types.SimpleNamespace(memory=memory, asleep=asleep, segments=segments)


def test_the_savers_segments_are_told_by_tag_and_those_of_others_are_not(saver):
    weights = saver.memory.regions("weights")
    assert [(one.address, one.size_bytes, one.mapped_bytes) for one in weights] == [
        (0x4000, 0x2000, 0x2000),
        (0x9000, 0x1000, 0x1000),
    ]
    assert [one.tag for one in saver.memory.regions()] == ["kv_cache", "weights", "weights"]
    assert saver.memory.device == 0


def test_what_torch_has_nothing_in_is_vacant(saver):
    assert saver.memory.vacant("weights") == ((0x9400, 0xC00),)


def test_sleeping_segments_are_what_they_were(saver):
    (before, *_) = saver.memory.regions("weights")
    assert saver.memory.is_mapped(before)
    saver.asleep.add("weights")
    saver.segments.clear()
    assert saver.memory.regions("weights")[0] == before
    assert not saver.memory.is_mapped(before)


def test_sglang_alone_moves_the_backing(saver):
    regions = saver.memory.regions("weights")
    for move in (saver.memory.release, saver.memory.remap):
        with pytest.raises(NativeError, match="SGLang alone"):
            move(regions)


def test_storages_are_described_by_what_refers_to_them_and_derived_buffers_are_not(engine_python, tmp_path):
    script = Path(__file__).parent / "sglang_semantic.py"
    done = subprocess.run(
        [engine_python, str(script), str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "described\n", done.stderr
