"""The main job on real vLLM: captured, restored beside its living original, killed, restored again, the same tokens."""

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from attrs import evolve

import coldsnap as cs
from coldsnap.drivers import n610
from coldsnap.drivers.page_images import Feed, shrink_pages
from coldsnap.engines.control import Ranks
from coldsnap.keeper.client import Keeper
from coldsnap.keeper.undo import CONTINUE, KILL
from still_memory import STILL, private_memory

pytestmark = [pytest.mark.vllm, pytest.mark.criu, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = "You may convey verbatim copies of the"
CLONE = Path(__file__).parents[1] / "execute" / "clone.py"
MAKER = Path(__file__).parents[2] / "examples" / "make_tiny_model.py"
ARGS = (
    "--dtype",
    "bfloat16",
    "--max-model-len",
    "512",
    "--max-num-seqs",
    "4",
    "--num-gpu-blocks-override",
    "64",
    "--enforce-eager",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory, engine_python):
    path = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run([engine_python, str(MAKER), str(path)], check=True, stdout=subprocess.DEVNULL)
    return path


def spec(model, engine_python, tmp_path, tensor_parallel):
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    if tensor_parallel > 1:
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}  # one NUMA node, two workers
    return cs.VLLM(model, args=(*ARGS, "-tp", str(tensor_parallel)), python=engine_python, env=env)


def complete(engine, model, **changes):
    """Return the token ids of a completion."""
    return request(engine, model, **changes)["choices"][0]["token_ids"]


def request(engine, model, **changes):
    """Return the answer to a completion request; the connection is closed by the server."""
    body = {
        "model": str(model),
        "prompt": PROMPT,
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    connection = http.client.HTTPConnection(engine.endpoint.host, engine.endpoint.port, timeout=120)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", "/v1/completions", json.dumps(body | changes), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
        assert response.status == 200, answer
    return answer


def sampled(engine, model, **changes):
    return complete(engine, model, temperature=1.0, **changes)


@contextlib.contextmanager
def decoy(pid):
    """Have some process of the host own a captured pid: its number in a namespace of its own is another matter."""
    child = None
    for _ in range(100):
        if Path(f"/proc/{pid}").exists():
            break
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        child = subprocess.Popen(["sleep", "600"])
        if child.pid != pid:  # somebody else was faster
            child.kill()
            child.wait()
    assert Path(f"/proc/{pid}").exists()
    try:
        yield
    finally:
        if child is not None:
            child.kill()
            child.wait()


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_captured_server_answers_the_same_beside_its_original_and_after_its_death(
    tensor_parallel, model, engine_python, criu, tmp_path, free_ports
):
    port, other = free_ports(2)
    policy, output = cs.Policy(), tmp_path / "artifact"

    def run(operation):
        report = cs.execute(cs.resolve(policy, operation, cs.probe(criu=criu)), on_event=cs.progress(file=sys.stdout))
        print(report.timeline)
        return report

    launched = run(cs.Launch(spec(model, engine_python, tmp_path, tensor_parallel), placement=cs.local(port=port)))
    with launched.engine as original:
        expected = complete(original, model)
        captured = run(cs.Capture(original, output=output, then="keep", prompt=PROMPT, answer_tokens=24))
        assert captured.workload == "the engine serves on"
        assert complete(original, model) == expected

        artifact = cs.Artifact.open(output)
        assert len(artifact.descriptor.topology.workers) == tensor_parallel
        with run(cs.Restore(artifact, placement=cs.local(port=other))).engine as clone, ExitStack() as more:
            assert clone.endpoint.port == other
            assert complete(clone, model) == expected
            assert complete(original, model) == expected
            # Every rank has taken the new incarnation, and none shares it with the original.
            incarnations = {reply["incarnation"] for reply in Ranks(clone.keeper.rank_dir).ping().values()}
            assert len(incarnations) == 1
            assert incarnations.isdisjoint(r["incarnation"] for r in Ranks(original.keeper.rank_dir).ping().values())
            unseeded = [sampled(engine, model) for engine in (original, clone)]
            assert unseeded[0] != unseeded[1]
            seeded = [sampled(engine, model, seed=7) for engine in (original, clone)]
            assert seeded[0] == seeded[1]
            if tensor_parallel == 1:
                clones = [clone, *(more.enter_context(each) for each in three_at_once(artifact, free_ports, run))]
                everybody_differs_in_nothing_but_what_nobody_seeded([original, *clones], model, expected)

    with decoy(artifact.descriptor.capsule.units[0].root_pid):
        for _ in range(2):
            report = run(cs.Restore(artifact, placement=cs.local(port=port)))
            with report.serving as restored:
                assert complete(restored, model) == expected
                assert 0 < report.answer_s <= report.timeline.seconds
    if tensor_parallel == 1:
        days_later(artifact, port, tmp_path, criu, lambda engine: complete(engine, model) == expected)
    assert not list(tmp_path.glob(".*partial*"))


def three_at_once(artifact, free_ports, run):
    """Restore three clones at the same moment; return their handles."""
    with ThreadPoolExecutor(3) as pool:
        began_s = time.monotonic()
        placements = [cs.local(port=port) for port in free_ports(3)]
        reports = list(pool.map(lambda placement: run(cs.Restore(artifact, placement=placement)), placements))
    print(f"three clones at once: {time.monotonic() - began_s:.2f} s")
    engines = [report.engine for report in reports]
    assert [engine.endpoint.port for engine in engines] == [placement.front.port for placement in placements]
    return engines


def everybody_differs_in_nothing_but_what_nobody_seeded(engines, model, expected):
    with ThreadPoolExecutor(len(engines)) as pool:
        assert list(pool.map(lambda engine: complete(engine, model), engines)) == [expected] * len(engines)
        unseeded = list(pool.map(lambda engine: tuple(sampled(engine, model)), engines))
        seeded = list(pool.map(lambda engine: sampled(engine, model, seed=7), engines))
        ids = list(pool.map(lambda engine: request(engine, model, max_tokens=1)["id"], engines))
    assert len(set(unseeded)) == len(engines)
    assert seeded == [seeded[0]] * len(engines)
    assert len(set(ids)) == len(engines)
    assert len({engine.status().incarnation for engine in engines}) == len(engines)


def days_later(artifact, port, tmp_path, criu, answers_exactly):
    """Restore where all clocks but the date are two days on, in a process of its own."""
    facts, run_dir = tmp_path / "facts.json", tmp_path / "later"
    cs.probe(criu=criu).save(facts)
    command = [sys.executable, str(CLONE), str(facts), str(artifact.path), str(port), str(run_dir), "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["clock_s"] > time.monotonic() + 86_400
    with cs.Engine.attach(run_dir) as engine:
        assert answers_exactly(engine)
        time.sleep(6)  # vLLM looks after its own processes every five seconds
        assert answers_exactly(engine)
        assert engine.status().state == "running"


def test_every_page_of_every_process_comes_back_as_it_was_dumped_compressed_or_not(
    model, engine_python, criu, tmp_path, free_port
):
    capsule = tmp_path / "capsule"
    capsule.mkdir(mode=0o700)
    engine = spec(model, engine_python, tmp_path, 1)
    launch = cs.Launch(evolve(engine, env={**engine.env, **STILL}), placement=cs.local(port=free_port))
    with cs.execute(cs.resolve(cs.Policy(), launch, cs.probe(criu=criu))).engine as running:
        with Keeper.connect(running.run_dir) as keeper, keeper.operation("capture", [CONTINUE]):
            n610.dump_tree(keeper, criu, capsule, leave="stopped", timeout_s=120)
            dumped = private_memory(keeper)  # stopped when CRIU let go of it: nothing has run since
            keeper.signal(signal.SIGCONT, whom="tree")
    assert len({pid for pid, _ in dumped}) >= 4  # front end, resource tracker, engine core, worker
    assert len(dumped) * 4096 > 500e6

    with thawed(tmp_path / "stored", capsule, criu, free_port, Feed()) as keeper:
        assert differing(private_memory(keeper), dumped) == []
    assert shrink_pages(capsule, compression="lz4").zero_bytes > 0
    with thawed(tmp_path / "compressed", capsule, criu, free_port, Feed(way="stream")) as keeper:
        assert differing(private_memory(keeper), dumped) == []


@contextlib.contextmanager
def thawed(run_dir, capsule, criu, port, feed):
    """Bring a capsule back with every process stopped before its first instruction."""
    keeper = Keeper.start(run_dir)
    try:
        with keeper.operation("restore", [KILL]):
            rebind = n610.Rebind(port=port, to_port=port)
            staged = n610.stage_tree(keeper, capsule, rebind=rebind, feed=feed)
            n610.thaw_tree(keeper, criu, staged, timeout_s=120, leave="stopped")
            yield keeper
    finally:
        keeper.stop(grace_s=0)


def differing(one, other):
    return [key for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key)]
