#!/usr/bin/env python3
"""Qualify vLLM on this machine: what a restore saves, and whether it answers as before.

    python examples/qualify_vllm.py --python ENGINE_PYTHON --json figures.json                   # a tiny model it makes
    python examples/qualify_vllm.py --model /models/qwen3-8b --minutes 8 -- --max-model-len 8192

    python examples/qualify_vllm.py --model /models/qwen3-8b --recovery 3 --json figures.json    # fails above 1.5

Everything after ``--`` goes to vLLM. On a machine with a GPU the weights leave the image for a pack (``--weights``),
and the same server frozen and thawed by hand (``by_hand.py``: vLLM's sleep level 2, CRIU, a reload) is the rival;
without one, they stay in the image and there is no rival. What is measured, and the keys of the JSON:
``qualifying.py``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from attrs import evolve

import coldsnap as cs
from qualifying import (  # type: ignore[import-not-found]  # beside this script
    Baseline,
    Qualification,
    common_arguments,
    workspace,
)
from showing import plot, table  # type: ignore[import-not-found]

SMALL = (
    *("--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "4"),
    *("--num-gpu-blocks-override", "64", "--enforce-eager"),
)
"""For two cores; eager, so that compiling is in no figure."""


def tiny_model(work: Path) -> str:
    """Make a small random Qwen3 model, unless it is there."""
    model = work / "tiny-qwen3"
    if not model.exists():
        maker = Path(__file__).parent / "make_tiny_model.py"
        subprocess.run([sys.executable, str(maker), str(model)], check=True, stdout=subprocess.DEVNULL)
    return str(model)


def described(work: Path, options: argparse.Namespace, *, gpu: bool) -> cs.VLLM:
    """Describe the server."""
    env = {"VLLM_CACHE_ROOT": str(work / "cache")} | dict(item.split("=", 1) for item in options.env)
    if not gpu:
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    arguments = tuple(options.engine_args) or (() if gpu else SMALL)
    return cs.VLLM(options.model or tiny_model(work), args=arguments, python=options.python, env=env)


def smaller_cache(args: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments with a twentieth of the GPU's memory less for vLLM."""
    name, default = "--gpu-memory-utilization", 0.9
    kept = list(args)
    if name not in kept:
        return (*kept, name, f"{default - 0.05:g}")
    at = kept.index(name) + 1
    return (*kept[:at], f"{float(kept[at]) - 0.05:g}", *kept[at + 1 :])


def sleep_and_reload(url: str) -> float:
    """Let vLLM drop its weights and load them again; return the seconds from the request to wake to all awake."""

    def post(path: str, **body: object) -> None:
        response = httpx.post(f"{url}/{path}", json=body or None, timeout=600, headers={"Connection": "close"})
        response.raise_for_status()

    post("sleep?level=2")
    begin = time.monotonic()
    post("wake_up?tags=weights")
    post("collective_rpc", method="reload_weights")
    post("wake_up?tags=kv_cache")
    return time.monotonic() - begin


def by_hand(spec: cs.VLLM, work: Path, options: argparse.Namespace) -> tuple[str, ...]:
    """Return the command of the rival, with the same model and arguments."""
    script = Path(__file__).parent / "by_hand.py"
    facts = cs.probe(criu=options.criu).host("local")
    command = [sys.executable, str(script), "--model", spec.model, "--work", str(work / "by-hand")]
    command += ["--criu", facts.criu.path if facts.criu else "criu", "--python", spec.python]
    command += ["--restores", str(options.restores), "--tokens", str(options.tokens)]
    command += [part for name, value in spec.env.items() for part in ("--env", f"{name}={value}")]
    return (*command, "--", *spec.args)


def policy(options: argparse.Namespace, *, gpu: bool) -> cs.Policy:
    """Return the policy that is qualified."""
    chosen = {} if options.weights == "auto" else {"weights.mode": options.weights}
    # One worker on a driver whose features this machine has proven.
    chosen |= {"compatibility.driver": "probed"} if gpu else {}
    return cs.Policy().evolve(**chosen)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; return 0 when every answer was equal, and a recovery that was asked for fast enough."""
    options = arguments(argv)
    gpu = bool(cs.probe(criu=options.criu).host("local").gpus)
    if gpu:
        print(cs.qualify_host(criu=options.criu))
    with workspace(options.work) as work:
        spec = described(work, options, gpu=gpu)
        qualification = Qualification(spec, policy(options, gpu=gpu), work, options)
        # vLLM has these paths in its development mode alone, which a server that is captured does not need; and with
        # another KV cache it must find the pack of the first capture.
        development = evolve(spec, env={**spec.env, "VLLM_SERVER_DEV_MODE": "1"}, args=smaller_cache(spec.args))
        development = development if gpu else spec
        baseline: Baseline | None = sleep_and_reload if gpu else None
        rival = by_hand(spec, work, options) if gpu and options.by_hand else ()
        result = qualification.run(baseline=baseline, baseline_spec=development, by_hand=rival)
    print(table(result))
    if options.plot:
        plot(options.plot, result)
    wrong = result["exact"]["different"] or result["digests"]["different"]
    slow = options.recovery > 0 and not result.get("recovery", {}).get("within")
    return 0 if result["exact"]["answers"] and not wrong and not slow else 1


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_arguments(parser)
    parser.add_argument("--model", help="directory of a model; without it a tiny one is made")
    parser.add_argument("--by-hand", action=argparse.BooleanOptionalAction, default=True, help="the rival, on a GPU")
    parser.add_argument("--weights", choices=("auto", "native", "image"), default="auto", help="weights.mode")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="environment of vLLM")
    parser.add_argument("engine_args", nargs="*", metavar="-- VLLM_ARGUMENT", help="arguments of vLLM")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
