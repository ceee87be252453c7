"""Memory changes hands at SGLang's boundary: in all ranks or in none, once, and back as it was."""

import re
import sys
import threading
import types
from pathlib import Path

import pytest

from coldsnap.engines.rank import Busy
from coldsnap.engines.sglang.updating import Updates
from coldsnap.errors import AdmissionError, EngineError, UnsupportedError

sys.path.insert(0, str(Path(__file__).parent))
from sglang_boundary import Device, Gone, Group, Rank, Request  # noqa: E402


@pytest.fixture
def rank(tmp_path):
    return Rank(tmp_path)


def together(*calls):
    """Do one thing in each rank at once, and return what each returned or raised."""
    results = [None] * len(calls)

    def do(number, call):
        try:
            results[number] = call()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=do, args=one) for one in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def test_a_release_writes_the_weights_and_sglang_takes_the_memory(rank):
    before = rank.bytes()
    reply = rank.release()
    assert reply["released"] == {"weights": 12288, "kv_cache": 8192}
    assert reply["pack"]["bytes"] == 8192
    assert rank.manager.calls == [("release", "weights", "kv_cache", "cuda_graph")]
    assert rank.steps == ["before", "leave"]
    assert not rank.memory.is_mapped(rank.weights)
    rank.hydrate()
    assert rank.manager.calls[1:] == [("resume", "weights"), ("resume", "kv_cache"), ("resume", "cuda_graph")]
    assert rank.steps == ["before", "leave", "enter", "after"]
    assert rank.bytes() == before


def test_what_is_zero_and_in_no_file_is_zero_again_on_a_device_too(tmp_path):
    rank = Rank(tmp_path, memory=Device(), weights_bytes=3 << 20)
    before = rank.bytes()
    reply = rank.release()
    assert reply["residual"]["bytes"] < 1 << 20
    rank.hydrate()
    assert rank.bytes() == before
    assert bytes(rank.memory.buffer(rank.kv)) == bytes(8192)


def test_without_the_weights_step_the_bytes_are_wrong(rank):
    before = rank.bytes()
    rank.release()
    rank.memory.remap([rank.weights])
    assert rank.bytes() != before


def test_a_second_release_answers_what_the_first_did(rank):
    first = rank.release()
    assert rank.release() == first
    assert len(rank.manager.calls) == 1


def test_a_resume_without_a_release_does_nothing(rank):
    assert rank.ask("resume") == ""
    assert rank.hydrate()["mapped"] == 0
    assert rank.manager.calls == []


def test_a_second_resume_does_nothing(rank):
    rank.release()
    rank.hydrate()
    calls = len(rank.manager.calls)
    assert rank.ask("resume") == ""
    assert rank.hydrate()["mapped"] == 0
    assert len(rank.manager.calls) == calls


def test_a_busy_engine_is_refused_and_keeps_its_memory(rank):
    rank.manager.idle = False
    with pytest.raises(Busy, match="still has requests"):
        rank.release()
    assert "still has requests" in rank.ask("release")
    assert rank.manager.calls == []
    assert rank.memory.is_mapped(rank.weights)


def test_a_kv_cache_that_is_not_discarded_stays(rank):
    rank.release(discard=[])
    assert rank.memory.is_mapped(rank.kv)
    assert not rank.memory.is_mapped(rank.weights)


def test_weights_may_come_back_before_the_kv_cache(rank):
    before = rank.bytes()
    rank.release()
    rank.hydrate(tags=["weights"])
    assert rank.bytes() == before
    assert not rank.memory.is_mapped(rank.kv)
    assert rank.steps == ["before", "leave", "enter"]
    rank.hydrate()
    assert rank.memory.is_mapped(rank.kv)
    assert rank.manager.offload_tags == set()


def test_a_hydrate_that_fails_is_told_and_can_be_repeated(rank):
    before = rank.bytes()
    rank.release()
    residual = rank.root / "generation" / "weights.blob"
    good = residual.read_bytes()
    residual.write_bytes(bytes(len(good)))
    with pytest.raises(Exception, match="weights.blob"):
        rank.hydrate()
    assert rank.resident.memory.state == "failed"
    residual.write_bytes(good)
    rank.hydrate()
    assert rank.bytes() == before
    assert rank.manager.offload_tags == set()


def test_what_goes_wrong_in_sglangs_own_part_ends_the_process(rank):
    def breaks(_manager, _request):
        raise RuntimeError("out of memory")

    with pytest.raises(Gone, match="out of memory"):
        rank.boundary.release(breaks, rank.manager, Request())


def test_each_draft_model_is_updated_from_its_own_checkpoint(rank):
    for path in ("/models/draft", "/models/second"):
        rank.resident.add_model(path, draft=True, path=path)
    assert list(rank.resident.models) == ["target", "draft", "draft-1"]

    def updated(model, load_format):
        updater = types.SimpleNamespace(get_model=lambda: model)
        return Updates(rank.resident).update(lambda _, path, __: path, updater, "/models/asked", load_format)

    assert updated("model", "coldsnap") == "/models/asked"
    assert updated("/models/draft", "coldsnap") == "/models/draft"
    assert updated("/models/second", "coldsnap") == "/models/second"
    assert updated("/models/second", "auto") == "/models/asked"


def test_a_pack_is_not_written_while_sglang_serves(rank):
    with pytest.raises(UnsupportedError, match="staged in the store"):
        rank.resident.operations()["materialize"]({})


# Several ranks


@pytest.fixture
def pair(tmp_path):
    group = Group(2)
    return Rank(tmp_path, rank=0, group=group), Rank(tmp_path, rank=1, group=group)


def test_two_ranks_release_and_come_back_together(pair):
    before = [one.bytes() for one in pair]
    assert all(reply["state"] == "sleeping" for reply in together(*(one.release for one in pair)))
    assert all(reply["state"] == "awake" for reply in together(*(one.hydrate for one in pair)))
    assert [one.bytes() for one in pair] == before


def test_one_rank_that_cannot_write_keeps_the_other_awake(pair):
    before = [one.bytes() for one in pair]
    first, second = pair
    second.root.write_text("no directory")
    told, failed = together(first.release, second.release)
    assert isinstance(told, EngineError)
    assert "rank 1" in str(told)
    assert isinstance(failed, Exception)
    assert [one.bytes() for one in pair] == before
    assert first.manager.calls == second.manager.calls == []
    second.root.unlink()
    assert all(reply["state"] == "sleeping" for reply in together(first.release, second.release))


def test_one_rank_that_cannot_fill_fails_both_and_both_can_try_again(pair):
    before = [one.bytes() for one in pair]
    together(*(one.release for one in pair))
    residual = pair[1].root / "generation" / "weights.blob"
    good = residual.read_bytes()
    residual.write_bytes(bytes(len(good)))
    told, failed = together(*(one.hydrate for one in pair))
    assert isinstance(told, EngineError)
    assert isinstance(failed, Exception)
    residual.write_bytes(good)
    assert all(reply["state"] == "awake" for reply in together(*(one.hydrate for one in pair)))
    assert [one.bytes() for one in pair] == before


def test_an_operation_that_reached_one_rank_only_is_done_by_none(pair):
    first, second = pair
    told, plain = together(first.release, lambda: second.ask("release"))
    assert isinstance(told, EngineError)
    assert "not at the same point" in plain
    assert first.manager.calls == second.manager.calls == []


# What a user asks SGLang itself


def live(tmp_path, backing, **more):
    environ = {"COLDSNAP_LIVE_BACKING": backing, "COLDSNAP_EXPORT_MODEL_PAYLOAD": "1", **more}
    return Rank(tmp_path, environ=environ)


def test_discarded_weights_do_not_come_back(tmp_path):
    rank = live(tmp_path, "discard")
    assert rank.ask("release") == ""
    assert rank.ask("resume") == ""
    assert rank.bytes() == bytes(12288)


def test_weights_that_wait_in_memory_come_back(tmp_path):
    rank = live(tmp_path, "cpu")
    before = rank.bytes()
    assert rank.ask("release") == ""
    assert not rank.memory.is_mapped(rank.weights)
    assert rank.ask("resume") == ""
    assert rank.bytes() == before


def test_a_release_to_disk_needs_a_directory(tmp_path):
    rank = live(tmp_path, "disk")
    assert "COLDSNAP_RUNTIME_DIR" in rank.ask("release")
    assert rank.manager.calls == []


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"COLDSNAP_LIVE_BACKING": "tape"}, "COLDSNAP_LIVE_BACKING is 'tape'"),
        ({"COLDSNAP_MODE": "on"}, "COLDSNAP_MODE is 'on'"),
        ({"COLDSNAP_MODE": "capture"}, "COLDSNAP_ARTIFACT_DIR is ''"),
        ({"COLDSNAP_MODE": "capture", "COLDSNAP_ARTIFACT_DIR": "/a"}, "COLDSNAP_PROCESS_ARTIFACT_ROOT is ''"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_at_the_start(tmp_path, more, told):
    with pytest.raises(AdmissionError, match=re.escape(told)):
        Rank(tmp_path, environ=more)


def test_a_kv_cache_alone_is_sglangs_own_business(tmp_path):
    rank = live(tmp_path, "disk")
    before = rank.bytes()
    assert rank.ask("release", ["kv_cache"]) == ""
    assert rank.ask("resume", ["kv_cache"]) == ""
    assert rank.bytes() == before
    assert rank.manager.calls == [("release", "kv_cache"), ("resume", "kv_cache")]


def test_weights_that_nobody_here_put_to_sleep_are_not_released_again(tmp_path):
    rank = live(tmp_path, "discard")
    rank.ask("release", ["weights"])
    with pytest.raises(Busy, match="nobody here put them to sleep"):
        rank.release()
