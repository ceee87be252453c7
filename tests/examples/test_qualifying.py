"""The qualification of an engine, on the reference engine, with what it has no time for."""

import argparse
import json
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import coldsnap as cs
from coldsnap.engines.acceptance import Answer
from coldsnap.testing.checkpoint import write_checkpoint

pytestmark = pytest.mark.criu

MEASURED = "vllm:request_decode_time_seconds"


def options(module, tmp_path, criu, port, *more):
    parser = argparse.ArgumentParser()
    module.common_arguments(parser)
    given = ["--criu", criu, "--port", str(port), "--tokens", "8", "--steady-tokens", "16", "--restores", "2"]
    return parser.parse_args([*given, "--json", str(tmp_path / "figures.json"), *more])


def test_an_engine_is_qualified_and_every_answer_and_tensor_compared(tmp_path, example, described, criu, free_port):
    module, living = example("qualifying"), example("living")
    more = "--recovery 1 --keep --sleep-wake 2 --undo dump --undo nothing --rate-warm-up 3".split()
    chosen = options(module, tmp_path, criu, free_port, *more)

    checkpoint = write_checkpoint(tmp_path / "model.safetensors", size_bytes=1 << 20)

    spec = described(weights=str(checkpoint))
    told = {"restore_s": [500.0, 501.0], "different": 1}
    rival = (sys.executable, "-c", f"import sys; open(sys.argv[-1], 'w').write({json.dumps(json.dumps(told))})")
    module.Qualification(spec, cs.Policy(), tmp_path, chosen).run(baseline=lambda url: 0.5, by_hand=rival)

    result = json.loads((tmp_path / "figures.json").read_text())
    (unknown,) = result["not_run"].values()
    assert unknown.startswith("a capture has no step 'nothing', but ")
    assert {name: len(row["seconds"]) for name, row in result["rows"].items()} == {
        "cold start, no compile cache": 1,
        **{f"capture: {step}": 1 for step in ("quiesce", "dump", "shrink", "seal", "commit")},
        "capture, whole": 1,
        "restore, hot": 2,
        "restore by recovery, hot": 1,
        living.KEPT: 1,
        living.ASLEEP: 2,
        living.AWAKE: 2,
        f"{living.UNDONE}: dump": 1,
        "cold start, caches warm": 1,
        "baseline: the engine's own sleep and reload": 2,
        "restore, cold": 1,
        module.BY_HAND: 2,
    }
    # Two hot restores, one by recovery, one warm start, one cold restore; and the engine that lived on: restored,
    # kept, beside its clone, woken twice, spared.
    assert result["exact"] == {"answers": 11 * len(module.PROMPTS), "different": 0}
    # Of the four matrices of the checkpoint, and the scales that are computed.
    assert result["digests"] == {"tensors": 5, "comparisons": 9, "different": {}}
    assert [set(split) >= {"admit-artifact", "thaw", "answer"} for split in result["split"]] == [True, True]
    recovery = result["recovery"]
    assert recovery["restored"]["admit-packs"]["effective"] == "recovery"
    assert result["restored"]["admit-packs"]["effective"].startswith("1 packs in")
    assert recovery["hydrate"] > 0
    assert recovery["within"] is (recovery["restore"] <= 1.5)
    assert result["speedup"] > 0
    assert result["over_by_hand"] > 1
    assert result["by_hand"] == told
    assert result["engines_own"] == {"answers": 2, "different": 0}
    assert result["sizes"]["images"] > 1 << 20
    assert_composed(result)
    assert [one["rate"]["clock"] for one in result["requests"]] == ["client"] * 3
    assert len(result["rate_ratios"]) == 2
    assert result["beside"]["ratio"] == pytest.approx(
        result["beside"]["clone"]["tokens_per_s"] / result["beside"]["original"]["tokens_per_s"]
    )
    assert [one["memory"] for one in result["asleep"]] == ["sleeping", "sleeping"]
    undone = result["undone"]["dump"]
    assert undone["error"] == "injected after dump"
    assert undone["workload"].startswith("the engine is running as before")
    assert not undone["output_left"]
    assert result["work"]["path"] == str(tmp_path)
    assert result["still_cached"][0] < result["sizes"]["images"] // 10
    assert example("showing").table(result).count("different: 0") == 2


def assert_composed(result):
    composed = result["composition"]
    assert composed["without_packs"] == sum(size for kind, size in result["sizes"].items() if kind != "packs")
    # Every page of the image belongs to a mapping of a known kind.
    in_files = composed["pages"]["raw_bytes"] - composed["pages"]["zero_bytes"]
    assert sum(size for kinds in composed["memory"].values() for size in kinds.values()) == in_files
    assert all("other" not in kinds for kinds in composed["memory"].values())
    (weights,) = composed["weights"].values()
    assert weights["model"] == result["sizes"]["packs"] > 0
    assert weights["residual"] > 0


def test_other_ways_back_are_held_against_the_same_answers_and_tensors(tmp_path, example, described, criu, free_port):
    module, ways = example("qualifying"), example("ways")
    chosen = options(module, tmp_path, criu, free_port, "--templates", "1")
    checkpoint = write_checkpoint(tmp_path / "model.safetensors", size_bytes=1 << 20)
    qualification = module.Qualification(described(weights=str(checkpoint)), cs.Policy(), tmp_path, chosen)

    qualification.part("capture", qualification.capture)
    for name, action in ways.parts(qualification).items():
        qualification.part(name, action)

    result = qualification.result
    native, recovery = (f"{ways.STARTED}, {provider}" for provider in ("native", "recovery"))
    assert result["not_run"] == {}
    counts = {ways.TEMPLATE: 1, native: 1, recovery: 1}
    assert {name: len(row["seconds"]) for name, row in result["rows"].items() if name in counts} == counts
    assert (qualification.compared, qualification.different) == (3 * len(module.PROMPTS), 0)
    assert result["digests"]["comparisons"] == 3
    assert result["digests"]["different"] == {}
    assert result["template"]["new_pack_bytes"] == 0, "both drivers share a pack"
    assert result["ways"][recovery]["report"]["checkpoint_bytes"] > 1 << 19
    assert result["ways"][native]["report"]["pack_moved_bytes"] >= 1 << 20


def test_without_a_template_nothing_is_started(tmp_path, example, described, criu, free_port):
    module, ways = example("qualifying"), example("ways")
    chosen = options(module, tmp_path, criu, free_port, "--templates", "1", "--minutes", "1")
    qualification = module.Qualification(described(), cs.Policy(), tmp_path, chosen)
    wanted = ways.parts(qualification)
    name = f"{ways.STARTED}, native"
    qualification.part(name, wanted[name])
    assert qualification.result["not_run"] == {name: "there is no template"}


def test_ranks_are_compared_in_their_order_whatever_their_process_ids_are(example):
    in_order = example("measuring").in_order
    first, second = {"a": "1"}, {"a": "2"}
    assert in_order({"worker.1001": second, "worker.99": first}) == {"worker 0": first, "worker 1": second}
    assert in_order({"engine.7": first}) == {"engine 0": first}


def test_clones_at_once_are_compared_while_all_of_them_serve(tmp_path, example, described, criu, free_ports):
    module = example("qualifying")
    port = next(port for port in free_ports(40) if port_is_free(port + 1))
    few = ("--clones", "2", "--restores", "0", "--cold-restores", "0", "--cold-starts", "0")
    chosen = options(module, tmp_path, criu, port, *few)

    result = module.Qualification(described(), cs.Policy(), tmp_path, chosen).run()

    assert result["not_run"] == {}
    assert len(result["rows"]["restore, 2 at once"]["seconds"]) == 2
    assert result["exact"] == {"answers": 2 * len(module.PROMPTS), "different": 0}


def port_is_free(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_what_the_time_does_not_allow_is_a_row_that_says_so(tmp_path, example, described, criu, free_port):
    module = example("qualifying")
    chosen = options(module, tmp_path, criu, free_port, "--minutes", "0")

    result = module.Qualification(described(), cs.Policy(), tmp_path, chosen).run()

    assert result["rows"] == {}
    assert set(result["not_run"]) == {"capture", "restore, hot", "cold start, caches warm", "restore, cold"}
    assert "capture" in example("showing").table(result)
    assert "not run: the 0 minutes were over" in example("showing").table(result)


def test_a_tensor_that_differs_or_is_missing_is_named(example):
    differences = example("measuring").differences

    assert differences({"worker.7": {"a": "1", "b": "2"}}, {"worker.7": {"a": "1", "b": "3", "c": "4"}}) == [
        "worker.7 b",
        "worker.7 c",
    ]
    assert differences({"worker.7": {"a": "1"}}, {}) == ["worker.7 a"]


@pytest.mark.parametrize(
    ("native", "recoveries", "told"),
    [
        ([2.0, 2.2, 9.0], [3.3, 1.0, 8.0], {"restore": 1.5, "hydrate": 2.0, "within": True}),
        ([2.0], [3.1], {"restore": 1.55, "hydrate": 2.0, "within": False}),
        (None, [3.0], {"restore": None, "hydrate": 2.0, "within": False}),
    ],
)
def test_a_recovery_is_held_against_restores_out_of_packs_by_their_medians(example, native, recoveries, told):
    splits = ([{"hydrate": 0.5}, {"hydrate": 1.0, "thaw": 3.0}, {"thaw": 1.0}], [{"hydrate": 0.375}])
    found = example("recovering").over_native(recoveries, native, *splits)
    assert found == {name: pytest.approx(value) for name, value in told.items()}


def test_an_answer_that_differs_is_counted(tmp_path, example, described, criu, free_port):
    module = example("qualifying")
    qualification = module.Qualification(described(), cs.Policy(), tmp_path, options(module, tmp_path, criu, free_port))
    first, second, other = (Answer(token_ids=ids, text="") for ids in ((1, 2), (3, 4), (3, 5)))
    qualification.answers = [first, second]

    qualification.compare([first, other])
    qualification.save()

    assert qualification.result["exact"] == {"answers": 2, "different": 1}


def test_without_an_artifact_nothing_is_restored(tmp_path, example, described, criu, free_port):
    module = example("qualifying")
    qualification = module.Qualification(described(), cs.Policy(), tmp_path, options(module, tmp_path, criu, free_port))

    qualification.part("restore, hot", lambda: qualification.restores("restore, hot", 1))

    assert qualification.result["not_run"] == {"restore, hot": "there is no artifact"}


class Counting(BaseHTTPRequestHandler):
    """Answers at once, takes a millisecond for each token by its own clock, and counts an answer late."""

    answers, seconds = 0, 0.0

    def do_GET(self):
        """Tell what was counted."""
        lines = [f'{MEASURED}_count{{engine="0"}} {self.answers}.0', f'{MEASURED}_sum{{engine="0"}} {self.seconds}']
        self._send("\n".join(["# TYPE x histogram", *lines]).encode())

    def do_POST(self):
        """Answer."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        threading.Timer(0.02, self._count, [0.001 * (body["max_tokens"] - 1)]).start()
        self._send(json.dumps({"usage": {"completion_tokens": body["max_tokens"]}}).encode())

    def _count(self, seconds):
        Counting.answers, Counting.seconds = Counting.answers + 1, Counting.seconds + seconds

    def _send(self, data):
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Say nothing."""


def test_tokens_per_second_are_by_the_clock_of_an_engine_that_has_one(example):
    measuring = example("measuring")
    with ThreadingHTTPServer(("127.0.0.1", 0), Counting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        rates = measuring.steady_rates([url, url], "m", 64, rounds=2, warm_up=8)
        server.shutdown()

    for rate in rates:
        assert rate.clock == "engine"
        assert (len(rate.warm_up), rate.settled) == (3, True)
        assert rate.rounds == pytest.approx([1000.0] * 2)
        assert rate.spread == pytest.approx(0.0, abs=1e-6)
