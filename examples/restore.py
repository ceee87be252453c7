"""Restore an engine and keep it until Ctrl-C, or hand it over with --detach.

python examples/restore.py ARTIFACT [--port 8000] [--detach]
"""

from __future__ import annotations

import argparse
import sys

import coldsnap as cs


def main() -> int:
    """Restore, print what happened, wait."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact")
    parser.add_argument("--criu")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--policy", help="policy.toml")
    parser.add_argument("--detach", action="store_true", help="leave it running; Engine.attach finds it again")
    options = parser.parse_args()

    policy = cs.Policy.load(options.policy) if options.policy else cs.Policy()
    try:
        artifact = cs.Artifact.open(options.artifact)
        restore = cs.Restore(artifact, placement=cs.local(port=options.port))
        report = cs.execute(cs.resolve(policy, restore, cs.probe(criu=options.criu)), on_event=cs.progress())
    except cs.ColdSnapError as error:
        print(f"not restored: {error}", file=sys.stderr)
        return 1
    print(report)
    print(report.timeline)
    if options.detach:
        print(f"attach with coldsnap.Engine.attach({str(report.engine.run_dir)!r})")
        report.engine.detach()
        return 0
    with report.engine as engine:
        print(f"{engine.endpoint.url} serves; Ctrl-C stops it")
        try:
            print(engine.wait())
        except KeyboardInterrupt:
            print("stopping")
    return 0


if __name__ == "__main__":
    sys.exit(main())
