"""The main job, on a real engine: start vLLM, capture it, kill it, bring it back, compare every token.

    python examples/quickstart.py [--python ENGINE_PYTHON] [--criu CRIU] [--work DIR] [--json FILE]

It makes a small random Qwen3 model, so it needs no download and no GPU. Every time is from the call that asks for it to
the first token of the same greedy request; a restore's time includes its admission checks.

``--json`` writes these keys: ``exact`` (bool), ``cold_start_s``, ``warm_cold_start_s`` (list), ``capture_s``,
``restore_first_token_s`` (list), ``restore_ready_s`` (list: the whole restore), ``speedup`` (fastest warm-cache cold
start over slowest restore), ``artifact_bytes``, ``image_bytes``, ``token_ids``, ``versions``, ``machine``, ``cache`` (what
was cached when).
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
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import httpx

import coldsnap as cs

ENGINE_ARGS = (
    "--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "4", "--num-gpu-blocks-override", "64", "--enforce-eager",
)  # fmt: skip
PROMPT = "This License applies to"
TOKENS = 24


def main() -> int:
    """Run the example; return 0 when every token was equal."""
    options = arguments()
    with workspace(options.work) as work:
        result = measure(options, work)
    print(table(result))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["exact"] else 1


def measure(options: argparse.Namespace, work: Path) -> dict[str, object]:
    """Start, capture, kill and restore; return the figures."""
    print(f"machine: {machine()}")
    say("a small random Qwen3 model is made (about 15 s)")
    model = work / "tiny-qwen3"
    maker = Path(__file__).parent / "make_tiny_model.py"
    subprocess.run([options.python, str(maker), str(model)], check=True, stdout=subprocess.DEVNULL)

    engine = cs.VLLM(
        str(model),
        args=ENGINE_ARGS,
        python=options.python,
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(work / "cache")},
    )
    policy = cs.Policy()
    place = cs.local(port=options.port)

    say("cold start: nothing of this model is compiled yet (about 20 to 60 s)")
    cold, reference = cold_start(policy, engine, options)
    warm = []
    for number in range(options.cold_starts):
        say(
            f"cold start {number + 1} of {options.cold_starts} with warm caches: what a restore has to beat (about 20 s)"
        )
        seconds, answer = cold_start(policy, engine, options)
        warm.append(seconds)
        if answer != reference:
            raise SystemExit("a cold start answered differently: greedy decoding is not deterministic here")

    say("capture: launch once more, record an answer, dump, seal, commit, kill (about 25 s)")
    output = work / "artifact"
    capture = cs.Capture(engine, output=output, placement=place, prompt=PROMPT, answer_tokens=TOKENS)
    plan = cs.resolve(policy, capture, probe(options))
    print(plan)
    report = cs.execute(plan, on_event=cs.progress(file=sys.stdout))
    capture_s = sum(report.timeline.between(step) for step in ("quiesce", "dump", "seal", "commit"))

    artifact = cs.Artifact.open(output)
    first_token, ready, exact = [], [], []
    for number in range(options.restores):
        say(f"restore {number + 1} of {options.restores}: the tree was killed, only the artifact is left")
        report = cs.execute(
            cs.resolve(policy, cs.Restore(artifact, placement=place), probe(options)),
            on_event=cs.progress(file=sys.stdout),
        )
        with report.engine as restored:
            first_token.append(report.answer_s)
            ready.append(report.timeline.seconds)
            exact.append(ask(restored.endpoint.url, str(model)) == reference)
        print(f"{report.timeline}\n  token ids {'identical' if exact[-1] else 'DIFFERENT'}")
    return {
        "exact": all(exact),
        "cold_start_s": cold,
        "warm_cold_start_s": warm,
        "capture_s": capture_s,
        "restore_first_token_s": first_token,
        "restore_ready_s": ready,
        "speedup": min(warm) / max(first_token),
        "artifact_bytes": sum(artifact.size_bytes.values()),
        "image_bytes": artifact.size_bytes["images"],
        "token_ids": reference,
        "versions": versions(artifact),
        "machine": machine(),
        "cache": "cold start: no compile cache; later starts and restores: caches and page cache warm",
    }


def cold_start(policy: cs.Policy, engine: cs.VLLM, options: argparse.Namespace) -> tuple[float, list[int]]:
    """Start the engine under a keeper, ask once, stop it; return seconds to the first token, and the token ids."""
    launch = cs.Launch(engine, placement=cs.local(port=options.port))
    plan = cs.resolve(policy, launch, probe(options))
    begin = time.monotonic()
    report = cs.execute(plan)
    with report.engine as running:
        asked = time.monotonic() - begin
        answer, first_s = streamed(running.endpoint.url, engine.served_model)
    seconds = asked + first_s
    print(f"  first token after {seconds:.2f} s: {answer}")
    return seconds, answer


def ask(url: str, model: str) -> list[int]:
    """Return the token ids of the greedy request."""
    return streamed(url, model)[0]


def streamed(url: str, model: str) -> tuple[list[int], float]:
    """Ask through the engine's own API; return the token ids and the seconds to the first of them."""
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    begin, first_s, ids = time.monotonic(), 0.0, []
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, timeout=120, headers={"Connection": "close"}
    ) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    ids += choice.get("token_ids") or []
                    first_s = first_s or (time.monotonic() - begin if ids else 0.0)
    return ids, first_s


def probe(options: argparse.Namespace) -> cs.Facts:
    """Probe this machine."""
    return cs.probe(criu=options.criu)


def table(result: dict) -> str:
    """Return the figures as a table."""
    warm, restores = result["warm_cold_start_s"], result["restore_first_token_s"]
    rows = [
        ("cold start, nothing compiled", f"{result['cold_start_s']:8.2f} s"),
        (
            "cold start, warm caches, fastest",
            f"{min(warm):8.2f} s   median {statistics.median(warm):.2f} s of {len(warm)}",
        ),
        ("capture (quiesce, dump, seal, commit)", f"{result['capture_s']:8.2f} s"),
        (
            "restore to first correct token, slowest",
            f"{max(restores):8.2f} s   median {statistics.median(restores):.2f} s of {len(restores)}",
        ),
        (
            "speed-up over the warm-cache cold start",
            f"{result['speedup']:8.1f} x   slowest restore against fastest start",
        ),
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
    work.mkdir(exist_ok=True)
    try:
        yield work
    finally:
        if given is None:
            shutil.rmtree(work)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has vLLM and this library")
    parser.add_argument("--criu", help="CRIU 4.2 or newer; looked for when not given")
    parser.add_argument("--port", type=int, default=18000)
    parser.add_argument("--work", help="directory to keep model, caches and artifact in; it must not hold an artifact")
    parser.add_argument("--cold-starts", type=int, default=2, help="warm-cache cold starts, at least 2")
    parser.add_argument("--restores", type=int, default=2)
    parser.add_argument("--json", help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
