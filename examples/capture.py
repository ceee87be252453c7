"""Capture an engine: the shortest useful script.

python examples/capture.py MODEL OUTPUT [--python ENGINE_PYTHON] [--port 8000] [--keep] [-- ENGINE ARGUMENTS]
"""

from __future__ import annotations

import argparse
import sys

import coldsnap as cs


def main() -> int:
    """Launch, capture, print what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model directory, or a hub id together with --revision")
    parser.add_argument("output", help="directory of the artifact; must not exist")
    parser.add_argument("--revision", help="40 hex digits, for a hub id")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--criu")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--policy", help="policy.toml")
    parser.add_argument("--keep", action="store_true", help="let the engine serve on after the capture")
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("args", nargs="*", help="further arguments of the engine, after --")
    options = parser.parse_args()

    policy = cs.Policy.load(options.policy) if options.policy else cs.Policy()
    engine = cs.VLLM(options.model, revision=options.revision, args=options.args, python=options.python)
    capture = cs.Capture(
        engine,
        output=options.output,
        placement=cs.local(port=options.port),
        then="keep" if options.keep else "stop",
    )
    try:
        plan = cs.resolve(policy, capture, cs.probe(criu=options.criu))
        print(plan)
        if options.plan_only:
            return 0
        report = cs.execute(plan, on_event=cs.progress())
    except cs.ColdSnapError as error:
        print(f"not captured: {error}", file=sys.stderr)
        return 1
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
