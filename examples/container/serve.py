"""Serve an engine in a container: restore it where there is an artifact, else start and capture it; then go on serving.

    python serve.py MODEL ARTIFACT [--port 8000] [--python ENGINE_PYTHON] [--policy FILE] [-- ENGINE ARGUMENTS]

The first container on a volume pays for the cold start and leaves ARTIFACT; every later one restores it. SIGTERM, which
is what stopping a container sends, stops the engine and ends this process with 0. A restore that is refused or fails
ends it with 1 and the reason: what to do then (remove the artifact, use another node) is not for a container to guess.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import coldsnap as cs
from coldsnap.artifact.durable import is_committed
from coldsnap.operation import EngineSpec


class Stopped(Exception):
    """SIGTERM or SIGINT arrived."""


def main(argv: Sequence[str] | None = None) -> int:
    """Describe vLLM as the command line says, and serve it until the container is stopped."""
    options = arguments(argv)
    engine = cs.VLLM(options.model, revision=options.revision, args=options.args, python=options.python)
    return serve(engine, options)


def serve(engine: EngineSpec, options: argparse.Namespace) -> int:
    """Bring the engine up, wait for the signal, take it down.

    Returns:
        The exit status: 0 after a signal, 1 when the engine could not be brought up or ended by itself.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        # An engine that is up when the signal comes is stopped by the end of the block; one that is on its way, by the
        # undoing of the operation.
        with bring_up(engine, options).serving as running:
            print(f"{running.endpoint.url} serves", flush=True)
            print(running.wait().story, file=sys.stderr)
    except Stopped:
        print("stopped", flush=True)
        return 0
    except cs.ColdSnapError as error:
        print(f"not served: {error}", file=sys.stderr)
    return 1


def bring_up(engine: EngineSpec, options: argparse.Namespace) -> cs.Report:
    """Restore the engine, or start and capture it; either way it serves then.

    Raises:
        ColdSnapError: It was refused, or it failed; nothing is left running.
    """
    policy = cs.Policy.load(options.policy) if options.policy else cs.Policy()
    placement = cs.local(port=options.port, address=options.address)
    operation: cs.Restore | cs.Capture
    if is_committed(options.artifact):
        operation = cs.Restore(cs.Artifact.open(options.artifact), placement=placement, store=options.store)
    else:
        operation = cs.Capture(engine, output=options.artifact, placement=placement, then="keep", store=options.store)
    facts = cs.probe(criu=options.criu)
    return cs.execute(cs.resolve(policy, operation, facts), on_event=cs.progress())


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model directory, or a hub id together with --revision")
    parser.add_argument("artifact", type=Path, help="directory of the artifact, on a volume")
    parser.add_argument("--revision", help="40 hex digits, for a hub id")
    parser.add_argument("--store", help="root of the store of packs, on a volume; beside the artifact when not given")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--address", default="0.0.0.0", help="where to listen")  # noqa: S104  of the container
    parser.add_argument("--python", default=sys.executable, help="interpreter that vLLM is installed in")
    parser.add_argument("--criu", help="CRIU 4.2 or newer; looked for when not given")
    parser.add_argument("--policy", help="policy.toml or policy.json")
    parser.add_argument("args", nargs="*", help="arguments of vLLM, after --")
    return parser.parse_intermixed_args(argv)


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise Stopped


if __name__ == "__main__":
    sys.exit(main())
