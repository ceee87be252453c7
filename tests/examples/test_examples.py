"""Each example does what its first lines say."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

import coldsnap as cs
from coldsnap.artifact.durable import is_committed
from coldsnap.testing.checkpoint import write_checkpoint

pytestmark = pytest.mark.criu

EXAMPLES = Path(__file__).parents[2] / "examples"


def ask(url):
    body = {"model": "reference", "prompt": "Who are you?", "max_tokens": 8, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=30, headers={"Connection": "close"}).json()


def test_capture_leaves_a_committed_artifact_and_no_engine(artifact):
    opened = cs.Artifact.open(artifact)

    assert opened.descriptor.engine.kind == "reference"
    assert opened.size_bytes["images"] > 1 << 20


def test_capture_plans_without_acting_when_only_the_plan_is_asked_for(
    tmp_path, example, described, criu, free_port, capsys
):
    capture = example("capture")
    output = tmp_path / "artifact"

    capture.capture(
        described(), capture.arguments(["m", str(output), "--criu", criu, "--port", str(free_port), "--plan-only"])
    )

    assert f"into {output}" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_capture_says_which_environment_is_wrong_and_does_nothing(tmp_path, example, criu, free_port, capsys):
    arguments = [str(tmp_path / "model"), str(tmp_path / "out"), "--criu", criu, "--port", str(free_port)]

    assert example("capture").main([*arguments, "--python", str(tmp_path / "python")]) == 1
    assert f"not captured: the engine's interpreter {tmp_path / 'python'} " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_restore_leaves_an_engine_that_another_process_attaches_to(
    example, artifact, criu, free_port, engine_name, capsys
):
    arguments = [str(artifact), "--criu", criu, "--port", str(free_port), "--name", engine_name, "--detach"]

    assert example("restore").main(arguments) == 0

    run_dir = re.search(r"Engine\.attach\('(.+)'\)", capsys.readouterr().out)[1]
    with cs.Engine.attach(run_dir) as engine:
        assert engine.name == engine_name
        assert engine.endpoint.port == free_port
        assert ask(engine.endpoint.url)["choices"][0]["token_ids"]

    with pytest.raises(cs.errors.EngineError):
        cs.Engine.attach(engine_name)


def test_restore_says_in_one_sentence_why_it_did_nothing(tmp_path, example, criu, capsys):
    assert example("restore").main([str(tmp_path / "nowhere"), "--criu", criu]) == 1
    assert capsys.readouterr().err == f"not restored: there is no artifact at {tmp_path / 'nowhere'}\n"


def test_the_orchestrator_swaps_two_engines_and_each_answers_as_before(
    tmp_path, example, described, criu, free_port, capsys
):
    orchestrator = example("orchestrator")
    engines = {"a": described(weights_seed=1), "b": described(weights_seed=2)}
    swapper = orchestrator.Swapper(engines, tmp_path, port=free_port, criu=criu)

    first_a, first_b, second_a, second_b = asyncio.run(orchestrator.serve(swapper, engines, rounds=2, prompt="Hello"))

    assert (first_a, first_b) == (second_a, second_b)
    assert first_a != first_b
    story = re.findall(r"^(\w): (.+) in [\d.]+ s$", capsys.readouterr().out, re.MULTILINE)
    assert story == [
        ("a", "cold start and capture"),
        ("b", "cold start and capture"),
        ("a", "restored"),
        ("b", "restored"),
    ]


def test_the_orchestrator_falls_back_to_a_cold_start_when_a_restore_is_refused(
    tmp_path, example, described, artifact, criu, free_port, capsys
):
    orchestrator = example("orchestrator")
    shutil.copytree(artifact, tmp_path / "a")
    image = max((tmp_path / "a").rglob("pages-*.img"))
    image.write_bytes(image.read_bytes()[:-1])
    engines = {"a": described()}

    answers = asyncio.run(
        orchestrator.serve(
            orchestrator.Swapper(engines, tmp_path, port=free_port, criu=criu), engines, rounds=1, prompt="Hello"
        )
    )

    said = capsys.readouterr()
    assert answers[0]
    assert "a: cold start in " in said.out
    assert f"a: not restored, starting it instead: {image}" in said.err


def test_the_orchestrator_does_not_take_an_engine_from_those_who_use_it(tmp_path, example, described, criu, free_port):
    orchestrator = example("orchestrator")
    engines = {"a": described(weights_seed=1), "b": described(weights_seed=2)}
    swapper = orchestrator.Swapper(engines, tmp_path, port=free_port, criu=criu)

    async def scene():
        async with swapper.use("a") as first:
            other = asyncio.create_task(orchestrator.serve(swapper, {"b": engines["b"]}, rounds=1, prompt="Hello"))
            async with swapper.use("a") as again:
                assert again is first
            assert ask(first.endpoint.url)["choices"]
            assert not other.done()
        return await other

    assert asyncio.run(scene())[0]


def test_the_quickstart_writes_the_keys_that_it_documents(tmp_path, example, described, criu, free_port, capsys):
    quickstart = example("quickstart")
    few = ["--criu", criu, "--port", str(free_port), "--cold-starts", "1", "--restores", "1"]

    result = quickstart.measure(described(), tmp_path, quickstart.arguments(few))

    documented = re.findall(r"``(\w+)``", quickstart.__doc__.split("writes these keys:")[1])
    assert list(result) == documented
    assert json.loads(json.dumps(result)) == result
    assert result["exact"] is True
    assert len(result["token_ids"]) == quickstart.TOKENS
    assert "identical" in quickstart.table(result)


def test_the_quickstart_makes_its_model_and_says_which_engine_environment_is_wrong(
    tmp_path, example, criu, free_port, capsys
):
    arguments = [
        "--criu",
        criu,
        "--port",
        str(free_port),
        "--work",
        str(tmp_path),
        "--python",
        str(tmp_path / "python"),
    ]

    assert example("quickstart").main(arguments) == 1

    assert (tmp_path / "tiny-qwen3" / "config.json").exists()
    assert f"the quickstart failed: the engine's interpreter {tmp_path / 'python'} " in capsys.readouterr().err


def test_the_doctor_says_what_blocks_and_keeps_it(example, tmp_path, capsys):
    doctor = example("doctor")

    assert doctor.main([str(os.getpid()), "--json", str(tmp_path / "diagnosis.json")]) == 1

    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"process {os.getpid()} (")
    assert "was not launched by ColdSnap" in first
    assert json.loads((tmp_path / "diagnosis.json").read_text())["pid"] == os.getpid()
    assert doctor.main(["4194999"]) == 2
    assert capsys.readouterr().err.startswith("there is no process 4194999")


def serve_until_it_answers(serve, engine, options, port):
    """Run the entry point in this thread; as soon as the engine answers, stop the container."""
    answers = []

    def visitor():
        for _ in range(600):
            with contextlib.suppress(httpx.HTTPError, KeyError):
                if is_committed(options.artifact):  # while it is captured it answers, too
                    answers.append(ask(f"http://127.0.0.1:{port}")["choices"][0]["token_ids"])
                    break
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    thread = threading.Thread(target=visitor)
    thread.start()
    try:
        status = serve(engine, options)
    finally:
        thread.join()
        for number, handler in before.items():
            signal.signal(number, handler)
    return status, answers


def test_the_first_container_captures_and_the_next_restores(tmp_path, example, described, criu, free_port, capsys):
    module = example("container/serve")
    output = tmp_path / "artifact"
    common = ["m", str(output), "--criu", criu, "--port", str(free_port), "--address", "127.0.0.1"]
    options = module.arguments(common)

    first = serve_until_it_answers(module.serve, described(), options, free_port)
    said = capsys.readouterr()
    assert cs.Artifact.open(output).descriptor.engine.kind == "reference"
    second = serve_until_it_answers(module.serve, described(), options, free_port)

    assert first == second and first[0] == 0 and first[1]
    assert said.out.endswith("serves\nstopped\n")
    again = capsys.readouterr()
    assert "commit" in said.out + said.err and "thaw" in again.out + again.err


def test_a_container_whose_artifact_is_damaged_says_so_and_ends(tmp_path, example, described, artifact, criu, capsys):
    module = example("container/serve")
    shutil.copytree(artifact, tmp_path / "a")
    (tmp_path / "a" / "artifact.json").write_bytes(b"{}")

    assert module.serve(described(), module.arguments(["m", str(tmp_path / "a"), "--criu", criu])) == 1
    assert "not served: " in capsys.readouterr().err


def test_the_files_for_containers_ask_for_the_capabilities_of_the_document():
    root = EXAMPLES / "container"
    wanted = {"SYS_ADMIN", "NET_ADMIN", "SYS_TIME", "SYS_PTRACE"}
    for name, pattern in (
        ("run.sh", r"--cap-add (\w+)"),
        ("compose.yaml", r"cap_add: \[(.+)\]"),
        ("pod.yaml", r"\{add: \[(.+)\]\}"),
    ):
        found = re.findall(pattern, (root / name).read_text())
        assert {one for text in found for one in text.split(", ")} == wanted, name
    run = (EXAMPLES.parent / "docs" / "deploy.md").read_text().partition("docker run")[2].partition("```")[0]
    assert set(re.findall(r"--cap-add (\w+)", run)) == wanted


@pytest.mark.parametrize("name", ["capture", "container/serve", "qualify_fresh_start"])
def test_arguments_of_the_engine_follow_two_dashes_wherever_the_options_are(example, name):
    arguments = example(name).arguments(
        ["model", "place", "--python", "/p", "--", "--max-model-len", "512", "-tp", "2"]
    )

    assert (arguments.model, arguments.python) == ("model", "/p")
    assert arguments.args == ["--max-model-len", "512", "-tp", "2"]


def test_a_fresh_start_is_qualified_without_its_checkpoint(tmp_path, example, described, criu):
    module = example("qualify_fresh_start")
    model = write_checkpoint(tmp_path / "model.safetensors", seed=3)
    options = module.arguments([str(model), str(tmp_path / "out"), "--criu", criu, "--restores", "1", "--other-driver"])

    found = module.qualify(described(weights=str(model)), options)

    assert found["exact"] and found["pack_read_exactly"] and found["one_pack"]
    assert model.exists() and not model.with_name("model.safetensors.away").exists()
    assert "identical" in module.table(found) and "the same" in module.table(found)
