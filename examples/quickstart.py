"""The main job, small: a real vLLM server is started, captured, killed and restored, and the token ids are compared.

    nox -s quickstart                           installs everything first
    python examples/quickstart.py [--python ENGINE_PYTHON] [--criu CRIU] [--work DIR] [--json FILE]

It makes a small random Qwen3 model, so it needs no download and no GPU. Every time is from the call that asks for it to
the first token of the same greedy request; a restore's time includes its admission checks.

``--json`` writes these keys: ``exact`` (bool), ``cold_start_s``, ``warm_cold_start_s`` (list), ``capture_s``,
``restore_first_token_s`` (list), ``restore_ready_s`` (list: the whole restore), ``speedup`` (fastest warm-cache cold
start over slowest restore), ``artifact_bytes``, ``image_bytes``, ``token_ids``, ``versions``, ``machine``, ``cache``
(what was cached when).
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import httpx

import coldsnap as cs

# Small enough for two cores; eager, so that compiling is in no figure.
ENGINE_ARGS = (
    *("--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "4"),
    *("--num-gpu-blocks-override", "64", "--enforce-eager"),
)
PROMPT = "This License applies to"
TOKENS = 24


class Restored(NamedTuple):
    """What one restore took, and whether the engine answered as before it was captured."""

    first_token_s: float
    ready_s: float
    exact: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; return 0 when every token was equal."""
    options = arguments(argv)
    print(f"machine: {machine()}")
    try:
        with workspace(options.work) as work:
            result = measure(tiny_vllm(work, options), work, options)
    except cs.ColdSnapError as error:
        print(f"\nthe quickstart failed: {error}", file=sys.stderr)
        return 1
    print(table(result))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["exact"] else 1


def tiny_vllm(work: Path, options: argparse.Namespace) -> cs.VLLM:
    """Make a small random Qwen3 model and describe a vLLM server for it."""
    say("a small random Qwen3 model is made")
    model = work / "tiny-qwen3"
    maker = Path(__file__).parent / "make_tiny_model.py"
    subprocess.run([sys.executable, str(maker), str(model)], check=True, stdout=subprocess.DEVNULL)
    return cs.VLLM(
        str(model),
        args=ENGINE_ARGS,
        python=options.python,
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(work / "cache")},
    )


def measure(engine: cs.VLLM, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Start, capture, kill and restore; return the figures."""
    say("cold start: nothing of this model is cached yet (20 s on a quiet machine, minutes on a busy one)")
    cold, reference = cold_start(engine, options)
    warm = []
    for number in range(options.cold_starts):
        say(f"cold start {number + 1} of {options.cold_starts} with warm caches: what a restore has to beat")
        seconds, answer = cold_start(engine, options)
        if answer != reference:
            raise SystemExit("a cold start answered differently: greedy decoding is not deterministic here")
        warm.append(seconds)

    say("capture: launch once more, record an answer, dump, seal, commit, kill")
    artifact, capture_s = capture(engine, work / "artifact", options)

    restored = []
    for number in range(options.restores):
        say(f"restore {number + 1} of {options.restores}: the tree was killed, only the artifact is left")
        restored.append(restore(artifact, engine, reference, options))
    return {
        "exact": all(each.exact for each in restored),
        "cold_start_s": cold,
        "warm_cold_start_s": warm,
        "capture_s": capture_s,
        "restore_first_token_s": [each.first_token_s for each in restored],
        "restore_ready_s": [each.ready_s for each in restored],
        "speedup": min(warm) / max(each.first_token_s for each in restored),
        "artifact_bytes": sum(artifact.size_bytes.values()),
        "image_bytes": artifact.size_bytes["images"],
        "token_ids": reference,
        "versions": versions(artifact),
        "machine": machine(),
        "cache": "cold start: no compile cache; later starts and restores: caches and page cache warm",
    }


def cold_start(engine: cs.VLLM, options: argparse.Namespace) -> tuple[float, list[int]]:
    """Start the engine under a keeper, ask once, stop it; return seconds to the first token, and the token ids."""
    plan = cs.resolve(cs.Policy(), cs.Launch(engine, placement=place(options)), cs.probe(criu=options.criu))
    begin = time.monotonic()
    report = cs.execute(plan)
    with report.serving as running:
        asked_s = time.monotonic() - begin
        answer, first_s = ask(running.endpoint.url, engine.served_model)
    print(f"  first token after {asked_s + first_s:.2f} s: {answer}", flush=True)
    return asked_s + first_s, answer


def capture(engine: cs.VLLM, output: Path, options: argparse.Namespace) -> tuple[cs.Artifact, float]:
    """Capture and kill; return the artifact, and the seconds from quiescing the engine to the commit."""
    operation = cs.Capture(engine, output=output, placement=place(options), prompt=PROMPT, answer_tokens=TOKENS)
    plan = cs.resolve(cs.Policy(), operation, cs.probe(criu=options.criu))
    print(plan)
    report = cs.execute(plan, on_event=cs.progress(file=sys.stdout))
    seconds = sum(report.timeline.between(step) for step in ("quiesce", "dump", "shrink", "seal", "commit"))
    return cs.Artifact.open(output), seconds


def restore(artifact: cs.Artifact, engine: cs.VLLM, reference: list[int], options: argparse.Namespace) -> Restored:
    """Bring the engine back, ask it what the first one was asked, stop it."""
    plan = cs.resolve(cs.Policy(), cs.Restore(artifact, placement=place(options)), cs.probe(criu=options.criu))
    report = cs.execute(plan, on_event=cs.progress(file=sys.stdout))
    with report.serving as restored:
        answer, _ = ask(restored.endpoint.url, engine.served_model)
    assert report.answer_s is not None  # noqa: S101 - a restore that succeeded has compared an answer
    exact = answer == reference
    print(f"{report.timeline}\n  token ids {'identical' if exact else 'DIFFERENT'}", flush=True)
    return Restored(report.answer_s, report.timeline.seconds, exact)


def ask(url: str, model: str) -> tuple[list[int], float]:
    """Ask greedily through the engine's own API; return the token ids, and the seconds to the first of them."""
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    # A connection that is kept alive would be open to the outside when the engine is dumped.
    headers = {"Connection": "close"}
    begin, first_s, ids = time.monotonic(), 0.0, list[int]()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120, headers=headers) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    ids += choice.get("token_ids") or []
                    first_s = first_s or (time.monotonic() - begin if ids else 0.0)
    return ids, first_s


def place(options: argparse.Namespace) -> cs.Placement:
    """Return where every engine of this example is placed: on one port of this machine."""
    return cs.local(port=options.port)


def table(result: Mapping[str, Any]) -> str:
    """Return the figures as a table."""
    warm, restores = result["warm_cold_start_s"], result["restore_first_token_s"]
    starts = f"median {statistics.median(warm):.2f} s of {len(warm)}"
    backs = f"median {statistics.median(restores):.2f} s of {len(restores)}"
    rows = [
        ("cold start, nothing cached", f"{result['cold_start_s']:8.2f} s"),
        ("cold start, warm caches, fastest", f"{min(warm):8.2f} s   {starts}"),
        ("capture (quiesce to commit)", f"{result['capture_s']:8.2f} s"),
        ("restore to first correct token, slowest", f"{max(restores):8.2f} s   {backs}"),
        ("speed-up over the warm-cache cold start", f"{result['speedup']:8.1f} x   slowest restore, fastest start"),
        ("artifact", f"{result['artifact_bytes'] / 1e6:8.1f} MB"),
        ("token ids after every restore", "identical" if result["exact"] else "DIFFERENT"),
    ]
    return "\n" + "\n".join(f"{name:<42}{value}" for name, value in rows)


def versions(artifact: cs.Artifact) -> dict[str, str]:
    """Return what took part."""
    engine, capsule = artifact.descriptor.engine, artifact.descriptor.capsule.units[0]
    return {
        "coldsnap": version("coldsnap"),
        engine.kind: engine.version,
        "torch": engine.torch,
        "python": engine.python.version,
        "criu": capsule.criu.version,
        "kernel": platform.release(),
    }


def machine() -> str:
    """Return the machine in a line."""
    facts = cs.probe().host("local")
    gpus = ", ".join(gpu.name for gpu in facts.gpus) or "no GPU"
    return f"{facts.cpu.model}, {facts.cpu.cores} cores, {facts.memory.total_bytes / 2**30:.0f} GiB, {gpus}"


def say(text: str) -> None:
    """Say what comes."""
    print(f"\n== {text}", flush=True)


@contextmanager
def workspace(given: str | None) -> Iterator[Path]:
    """Yield the directory for model, caches and artifact; a made-up one is removed."""
    work = Path(given or tempfile.mkdtemp(prefix="coldsnap-quickstart-")).absolute()
    work.mkdir(parents=True, exist_ok=True)
    try:
        yield work
    finally:
        if given is None:
            shutil.rmtree(work)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has vLLM and this library")
    parser.add_argument("--criu", help="CRIU 4.2 or newer; looked for when not given")
    parser.add_argument("--port", type=int, default=18000)
    parser.add_argument("--work", help="directory to keep model, caches and artifact in; it must not hold an artifact")
    parser.add_argument("--cold-starts", type=int, default=2, help="warm-cache cold starts, at least 1")
    parser.add_argument("--restores", type=int, default=2, help="at least 1")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(argv)
    if options.cold_starts < 1 or options.restores < 1:
        parser.error("nothing can be compared without one warm cold start and one restore")
    return options


if __name__ == "__main__":
    sys.exit(main())
