#!/usr/bin/env python3
"""Say what would block or spoil a capture of a running server, without touching it.

    python examples/doctor.py PID [--criu PATH] [--allow-secrets] [--json FILE]

PID is what ``vllm serve`` runs as; its descendants belong to it. The exit status is 1 when a capture would be refused.
"""

import argparse
import sys

import coldsnap as cs


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="What would block or spoil a capture of a running server?")
    parser.add_argument("pid", type=int, help="the root of its process tree")
    parser.add_argument("--criu", help="the CRIU to use")
    parser.add_argument("--allow-secrets", action="store_true", help='as process.secrets = "allow"')
    parser.add_argument("--json", metavar="FILE", help="keep the diagnosis")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Look, print, and keep it."""
    options = arguments(words)
    try:
        diagnosis = cs.diagnose(options.pid, criu=options.criu, secrets="note" if options.allow_secrets else "blocks")
    except cs.ColdSnapError as error:
        print(error, file=sys.stderr)
        return 2
    print(diagnosis)
    if options.json:
        diagnosis.save(options.json)
    return int(diagnosis.blocked)


if __name__ == "__main__":
    raise SystemExit(main())
