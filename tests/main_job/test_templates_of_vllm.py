"""A template of real vLLM: captured once, started twice at once out of its pack, then out of its checkpoint."""

import contextlib
import http.client
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import coldsnap as cs
from coldsnap.transfer.safetensors import index

pytestmark = [pytest.mark.vllm, pytest.mark.criu, pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPT = "You may convey verbatim copies of the"
MAKER = Path(__file__).parents[2] / "examples" / "make_tiny_model.py"
SMALL = ("--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "4", "--num-gpu-blocks-override", "64")
TEMPLATE = {"compatibility.driver": "n580"}


def complete(engine, model):
    """Return the token ids of a completion; the connection is closed by the server."""
    body = {"model": str(model), "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
    connection = http.client.HTTPConnection(engine.endpoint.host, engine.endpoint.port, timeout=120)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", "/v1/completions", json.dumps(body | {"ignore_eos": True}), headers)
        return json.loads(connection.getresponse().read())["choices"][0]["token_ids"]


def tensors_of(model):
    """Return how many bytes of tensors a checkpoint has."""
    return sum(one.length for one in index(model.glob("*.safetensors")).values())


def test_a_template_is_started_twice_at_once_out_of_its_pack_and_then_out_of_its_checkpoint(
    tmp_path, engine_python, criu, free_ports
):
    model, output = tmp_path / "tiny", tmp_path / "artifact"
    subprocess.run([engine_python, str(MAKER), str(model)], check=True, stdout=subprocess.DEVNULL)
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    spec = cs.VLLM(model, args=(*SMALL, "--enforce-eager"), python=engine_python, env=env)
    facts, ports = cs.probe(criu=criu), free_ports(4)

    def run(operation, **leaves):
        plan = cs.resolve(cs.Policy().evolve(**leaves), operation, facts)
        return cs.execute(plan, on_event=cs.progress(file=sys.stdout))

    captured = run(cs.Capture(spec, output=output, placement=cs.local(port=ports[0]), then="keep"), **TEMPLATE)
    with captured.serving as original:
        expected = complete(original, model)
    artifact = cs.Artifact.open(output)
    (pack,) = artifact.descriptor.weights.payloads.objects
    assert captured.receipt("prove").reason == "no device, no library of a driver"
    model.rename(tmp_path / "moved-away")

    with ThreadPoolExecutor(2) as pool:
        operations = [cs.Restore(artifact, placement=cs.local(port=port)) for port in ports[1:3]]
        reports = list(pool.map(run, operations))

    with contextlib.ExitStack() as serving:
        engines = [serving.enter_context(report.serving) for report in reports]
        assert [complete(engine, model) for engine in engines] == [expected, expected]
        for report in reports:
            assert report.receipt("report").details["pack_bytes"] == pack.bytes
            assert report.receipt("answer").effective.endswith("tokens as captured")

    (tmp_path / "moved-away").rename(model)
    recovery = {"weights.mode": "recovery"}
    recovered = run(cs.Restore(artifact, placement=cs.local(port=ports[3])), **recovery)
    with recovered.serving as engine:
        assert complete(engine, model) == expected
        details = recovered.receipt("report").details
        assert details["pack_moved_bytes"] == 0
        assert details["checkpoint_bytes"] == tensors_of(model)
