"""Restore an engine and keep it until Ctrl-C, or leave it running with ``--detach``.

    python examples/restore.py ARTIFACT [--port 8000] [--detach]

The engine, its arguments and its environment are in the artifact; only the place is chosen here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import coldsnap as cs


def main(argv: Sequence[str] | None = None) -> int:
    """Restore, print what happened, wait."""
    options = arguments(argv)
    try:
        report = restore(options)
    except cs.ColdSnapError as error:
        print(f"not restored: {error}", file=sys.stderr)
        return 1
    print(report)
    print(report.timeline)
    if options.detach:
        print(f"find it again with coldsnap.Engine.attach({str(report.serving.run_dir)!r})")
        report.serving.detach()
        return 0
    with report.serving as engine:
        print(f"{engine.endpoint.url} serves; Ctrl-C stops it", flush=True)
        try:
            print(engine.wait().story)
        except KeyboardInterrupt:
            print("stopping")
    return 0


def restore(options: argparse.Namespace) -> cs.Report:
    """Bring the engine back.

    Raises:
        ColdSnapError: It was refused, or it failed; nothing is left running.
    """
    policy = cs.Policy.load(options.policy) if options.policy else cs.Policy()
    operation = cs.Restore(cs.Artifact.open(options.artifact), placement=cs.local(port=options.port, name=options.name))
    return cs.execute(cs.resolve(policy, operation, cs.probe(criu=options.criu)), on_event=cs.progress())


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact")
    parser.add_argument("--criu", help="CRIU 4.2 or newer; looked for when not given")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--name", help="name of the engine, for Engine.attach; made up when not given")
    parser.add_argument("--policy", help="policy.toml or policy.json")
    parser.add_argument("--detach", action="store_true", help="leave it running; Engine.attach finds it again")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
