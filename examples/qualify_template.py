#!/usr/bin/env python3
"""Qualify templates on this machine: what a started engine costs, in parts, and whether it answers as captured.

    python examples/qualify_template.py --python ENGINE_PYTHON --json figures.json              # a tiny model it makes
    python examples/qualify_template.py --model /models/qwen3-8b --scopes portable target-local -- --max-num-seqs 64

Everything after ``--`` goes to vLLM. For each scope (``portable``: a template stops at ``pre_exec``, ``target-local``:
at ``imported``) one capture and several restores, set against launches with warm caches. The parts of a start come from
the engine's own log: ``imports`` is how long after its process began each rank came up.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import coldsnap as cs

PARTS = {
    "weights_s": r"Loading weights took ([\d.]+) s",
    "model_s": r"Model loading took .*? and ([\d.]+) s",
    "kv_and_warmup_s": r"init engine \(.*?\) took ([\d.]+) s",
    "graphs_s": r"Graph capturing finished in ([\d.]+) s",
}
RANK = re.compile(r"\[coldsnap\] (\w+) \d+: listening, .*? ([\d.]+) s after its process began")
SMALL = (
    *("--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "4"),
    *("--num-gpu-blocks-override", "64", "--enforce-eager"),
)


def parts_of(log: str) -> dict[str, Any]:
    """Return what an engine's log tells of its start, s: each part that it names, and each rank's imports."""
    found = {name: [float(value) for value in re.findall(pattern, log)] for name, pattern in PARTS.items()}
    parts: dict[str, Any] = {name: max(values) for name, values in found.items() if values}
    return parts | {"imports": {role: float(seconds) for role, seconds in RANK.findall(log)}}


class Measurement:
    """Captures and restores of one engine.

    Args:
        spec: The engine.
        work: A directory of its own.
        options: Of the command line.
    """

    def __init__(self, spec: Any, work: Path, options: argparse.Namespace) -> None:
        self.spec, self.work, self.options = spec, work, options
        self.facts = cs.probe(criu=options.criu)

    def run(self) -> dict[str, Any]:
        """Measure; return the figures."""
        result: dict[str, Any] = {"launches": [self.launch() for _ in range(self.options.launches)], "scopes": {}}
        for scope in self.options.scopes:
            result["scopes"][scope] = self.scope(scope)
            if self.options.json:
                Path(self.options.json).write_text(json.dumps(result, indent=1) + "\n")
        return result

    def launch(self) -> dict[str, Any]:
        """Start the engine as it always starts; caches are warm from the second time on."""
        report = self.execute(cs.Policy(), cs.Launch(self.spec, placement=self.place("launch")))
        with report.serving as engine:
            return {
                "ready_s": report.timeline.between("launch") + report.timeline.between("ready"),
                **parts_of(log_of(engine)),
            }

    def scope(self, scope: str) -> dict[str, Any]:
        """Capture once, restore several times; the plans compare every answer."""
        policy = cs.Policy().evolve(**{"compatibility.driver": "n580", "process.artifact_scope": scope})
        output = self.work / scope
        report = self.execute(policy, cs.Capture(self.spec, output=output, placement=self.place("capture")))
        artifact = cs.Artifact.open(output)
        restores = [self.restore(artifact) for _ in range(self.options.restores)]
        return {
            "proof": report.receipt("prove").reason,
            "pack": next((one.sha256 for one in payloads(artifact)), ""),
            "sizes": dict(artifact.size_bytes),
            "capture_s": report.timeline.seconds,
            "restores": restores,
        }

    def restore(self, artifact: cs.Artifact) -> dict[str, Any]:
        """Restore once, and say what it took."""
        report = self.execute(cs.Policy(), cs.Restore(artifact, placement=self.place("restore")))
        with report.serving as engine:
            steps = {span.name: round(span.seconds, 3) for span in report.timeline.spans}
            told = {one.step: dict(one.details) for one in report.receipts if one.step == "report"}
            return {"answer_s": report.answer_s, "steps": steps, **told, **parts_of(log_of(engine))}

    def place(self, name: str) -> cs.Placement:
        """Return where every engine is placed."""
        return cs.local(port=self.options.port, run_dir=self.work / f"run-{name}")

    def execute(self, policy: cs.Policy, operation: Any) -> cs.Report:
        """Resolve and run."""
        print(f"== {type(operation).__name__}", flush=True)
        return cs.execute(cs.resolve(policy, operation, self.facts), on_event=cs.progress(file=sys.stderr))


def log_of(engine: cs.Engine) -> str:
    """Return the log of a running engine."""
    return (engine.run_dir / "rank" / "engine.log").read_text(errors="replace")


def payloads(artifact: cs.Artifact) -> Sequence[Any]:
    """Return the packs of an artifact."""
    found = artifact.descriptor.weights.payloads
    return () if found is None else found.objects


def table(result: Mapping[str, Any]) -> str:
    """Return the figures for people."""
    lines = [f"{'launch, ready':<32} {one['ready_s']:8.2f} s  {shown(one)}" for one in result["launches"]]
    for scope, found in result["scopes"].items():
        seconds = [one["answer_s"] for one in found["restores"]]
        lines.append(f"{scope + ', first answer':<32} {statistics.median(seconds):8.2f} s  of {len(seconds)}")
        lines += [f"{'':<32} {one['answer_s']:8.2f} s  {shown(one)}" for one in found["restores"]]
        lines.append(f"{'':<32} {found['proof']}; pack {found['pack'][:19] or 'none'}")
    return "\n".join(lines)


def shown(one: Mapping[str, Any]) -> str:
    """Return the parts of one start in a line."""
    imports = " ".join(f"{role} {seconds:.1f}" for role, seconds in one["imports"].items())
    return f"imports: {imports or 'not told'}; " + ", ".join(f"{name} {one[name]:.2f}" for name in PARTS if name in one)


def described(work: Path, options: argparse.Namespace) -> cs.VLLM:
    """Describe the server."""
    env = {"VLLM_CACHE_ROOT": str(work / "cache")}
    gpu = bool(cs.probe(criu=options.criu).host("local").gpus)
    env |= {} if gpu else {"VLLM_CPU_KVCACHE_SPACE": "1"}
    model = options.model or str(work / "tiny-qwen3")
    if options.model is None:
        maker = Path(__file__).parent / "make_tiny_model.py"
        subprocess.run([options.python, str(maker), model], check=True, stdout=subprocess.DEVNULL)
    return cs.VLLM(model, args=tuple(options.engine_args) or (() if gpu else SMALL), python=options.python, env=env)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has vLLM and this library")
    parser.add_argument("--criu", help="CRIU 4.2 or newer; looked for when not given")
    parser.add_argument("--port", type=int, default=18000)
    parser.add_argument("--work", type=Path, help="directory to keep model, caches and artifacts in")
    parser.add_argument("--model", help="directory of a model; without it a tiny one is made")
    parser.add_argument("--scopes", nargs="+", choices=("portable", "target-local"), default=["portable"])
    parser.add_argument("--launches", type=int, default=2, help="ordinary launches to compare with")
    parser.add_argument("--restores", type=int, default=3, help="of each scope")
    parser.add_argument("--json", help="write the figures to this file, after each scope")
    parser.add_argument("engine_args", nargs="*", metavar="-- VLLM_ARGUMENT", help="arguments of vLLM")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; an answer that differs ends it with an error."""
    options = arguments(argv)
    with ExitStack() as stack:
        work = options.work or Path(stack.enter_context(TemporaryDirectory(prefix="coldsnap-template-")))
        work.mkdir(parents=True, exist_ok=True)
        result = Measurement(described(work, options), work, options).run()
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
