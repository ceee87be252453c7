"""Capture an engine: the shortest useful script.

    python examples/capture.py MODEL OUTPUT [--python ENGINE_PYTHON] [--port 8000] [--keep] [-- ENGINE ARGUMENTS]

MODEL is a model directory, or a hub id together with ``--revision``. The engine is launched, asked one question whose
answer is recorded, dumped into the new directory OUTPUT, and stopped; with ``--keep`` it serves on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import coldsnap as cs
from coldsnap.operation import EngineSpec


def main(argv: Sequence[str] | None = None) -> int:
    """Describe vLLM as the command line says, and capture it."""
    options = arguments(argv)
    try:
        engine = cs.VLLM(options.model, revision=options.revision, args=options.args, python=options.python)
        capture(engine, options)
    except cs.ColdSnapError as error:
        print(f"not captured: {error}", file=sys.stderr)
        return 1
    return 0


def capture(engine: EngineSpec, options: argparse.Namespace) -> None:
    """Plan the capture and show the plan; execute it unless only the plan was asked for.

    Raises:
        ColdSnapError: It was refused, or it failed; nothing half-made is left.
    """
    policy = cs.Policy.load(options.policy) if options.policy else cs.Policy()
    operation = cs.Capture(
        engine,
        output=options.output,
        placement=cs.local(port=options.port),
        then="keep" if options.keep else "stop",
    )
    plan = cs.resolve(policy, operation, cs.probe(criu=options.criu))
    print(plan)
    if options.plan_only:
        return
    report = cs.execute(plan, on_event=cs.progress())
    print(report)
    if options.keep:
        # What keeps an engine alive is its keeper, not this process: it may end now.
        print(f"find it again with coldsnap.Engine.attach({str(report.serving.run_dir)!r})")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model directory, or a hub id together with --revision")
    parser.add_argument("output", help="directory of the artifact; must not exist")
    parser.add_argument("--revision", help="40 hex digits, for a hub id")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has vLLM and this library")
    parser.add_argument("--criu", help="CRIU 4.2 or newer; looked for when not given")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--policy", help="policy.toml or policy.json")
    parser.add_argument("--keep", action="store_true", help="let the engine serve on after the capture")
    parser.add_argument("--plan-only", action="store_true", help="print what would be done, and why; do nothing")
    parser.add_argument("args", nargs="*", help="further arguments of the engine, after --")
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    sys.exit(main())
