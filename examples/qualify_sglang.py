#!/usr/bin/env python3
"""Qualify SGLang on this machine: what a restore saves, and whether it answers as before.

    python examples/qualify_sglang.py --python ENGINE_PYTHON --json figures.json                 # a tiny model it makes
    python examples/qualify_sglang.py --model /models/qwen3-8b --minutes 8 -- --context-length 8192

Everything after ``--`` goes to SGLang. On a machine with a GPU the weights leave the image for a pack (``--weights``),
and SGLang's own release and resume with a reload of the weights is the baseline; without one, the environment must have
a stand-in for the memory saver if they are to leave (``--weights native -- --enable-memory-saver …``), and there is no
baseline. What is measured, and the keys of the JSON: ``qualifying.py``; ``speedup`` says how often the slowest hot
restore fits into the fastest cold start with warm caches. One run of both drivers and of both sources of weights:

    python examples/qualify_sglang.py --model /models/qwen3-0.6b --work /dev/shm/sglang --recovery 3 --templates 3
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import httpx

import coldsnap as cs
from qualifying import (  # type: ignore[import-not-found]  # beside this script
    Baseline,
    Qualification,
    common_arguments,
    workspace,
)
from showing import plot, table  # type: ignore[import-not-found]

SMALL = (
    *("--attention-backend", "torch_native", "--max-total-tokens", "4096", "--mem-fraction-static", "0.1"),
    *("--context-length", "2048", "--sleep-on-idle"),
)
"""For two cores."""


def tiny_model(work: Path) -> str:
    """Make a small random Qwen3 model, unless it is there."""
    model = work / "tiny-qwen3"
    if not model.exists():
        maker = Path(__file__).parent / "make_tiny_model.py"
        subprocess.run([sys.executable, str(maker), str(model)], check=True, stdout=subprocess.DEVNULL)
    return str(model)


def described(work: Path, options: argparse.Namespace, *, gpu: bool) -> cs.SGLang:
    """Describe the server."""
    env = dict(item.split("=", 1) for item in options.env)
    arguments = tuple(options.engine_args) or (() if gpu else SMALL)
    return cs.SGLang(options.model or tiny_model(work), args=arguments, python=options.python, env=env)


def release_and_reload(url: str, *, model: str) -> float:
    """Let SGLang drop its memory and load the weights again; return the seconds from the resume to all awake."""

    def post(path: str, **body: object) -> None:
        response = httpx.post(f"{url}/{path}", json=body, timeout=600, headers={"Connection": "close"})
        response.raise_for_status()

    post("release_memory_occupation")
    begin = time.monotonic()
    post("resume_memory_occupation")
    post("update_weights_from_disk", model_path=model)
    return time.monotonic() - begin


def policy(options: argparse.Namespace, *, gpu: bool) -> cs.Policy:
    """Return the policy that is qualified."""
    chosen = {} if options.weights == "auto" else {"weights.mode": options.weights}
    # One worker on a driver whose features this machine has proven.
    chosen |= {"compatibility.driver": "probed"} if gpu else {}
    return cs.Policy().evolve(**chosen)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; return 0 when every answer was equal."""
    options = arguments(argv)
    gpu = bool(cs.probe(criu=options.criu).host("local").gpus)
    if gpu:
        print(cs.qualify_host(criu=options.criu))
    with workspace(options.work) as work:
        spec = described(work, options, gpu=gpu)
        qualification = Qualification(spec, policy(options, gpu=gpu), work, options)
        baseline: Baseline | None = partial(release_and_reload, model=spec.model_argument) if gpu else None
        result = qualification.run(baseline=baseline)
    print(table(result))
    if options.plot:
        plot(options.plot, result)
    wrong = result["exact"]["different"] or result["digests"]["different"]
    return 0 if result["exact"]["answers"] and not wrong else 1


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_arguments(parser)
    parser.add_argument("--model", help="directory of a model; without it a tiny one is made")
    parser.add_argument("--weights", choices=("auto", "native", "image"), default="auto", help="weights.mode")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="environment of SGLang")
    parser.add_argument("engine_args", nargs="*", metavar="-- SGLANG_ARGUMENT", help="arguments of SGLang")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
