"""The arguments and the directory that qualifications of engines share.

The one rule: what a qualification takes an hour for, or what may end an engine, runs only when it is asked for.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STEADY_TOKENS = 1024


def common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that every engine's qualification has."""
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the engine and this library")
    parser.add_argument("--criu", help="CRIU 4.2 or newer; looked for when not given")
    parser.add_argument("--port", type=int, default=18000)
    parser.add_argument("--work", type=Path, help="directory of artifact and store, on the filesystem to be measured")
    parser.add_argument("--minutes", type=float, default=60, help="what has not begun by then is not run")
    parser.add_argument("--restores", type=int, default=3)
    parser.add_argument("--recovery", type=int, default=0, help="restores out of the checkpoint, beside those of packs")
    parser.add_argument("--cold-restores", type=int, default=1)
    parser.add_argument(
        "--clones", type=int, default=0, help="restores at the same moment, at as many ports from --port"
    )
    parser.add_argument("--cold-starts", type=int, default=1, help="starts with warm caches")
    parser.add_argument("--tokens", type=int, default=64, help="of each compared answer")
    parser.add_argument(
        "--steady-tokens", type=int, default=STEADY_TOKENS, help="of the request that rates are taken of"
    )
    parser.add_argument("--rate-rounds", type=int, default=5, help="such requests, after a warm-up")
    parser.add_argument("--rate-warm-up", type=int, default=8, help="the most of it: it ends when three in a row agree")
    parser.add_argument(
        "--templates", type=int, default=0, metavar="N", help="a capture with n580, and restores of it by each provider"
    )
    parser.add_argument("--keep", action="store_true", help="a capture that keeps its workload, and a clone beside it")
    parser.add_argument("--sleep-wake", type=int, default=0, metavar="N", help="rounds of Sleep and Wake")
    parser.add_argument(
        "--undo",
        action="append",
        default=[],
        metavar="STEP",
        help="a capture that fails after this step (dump, seal, …) of its plan; may be repeated",
    )
    parser.add_argument("--ready-timeout-s", type=float, default=1800)
    parser.add_argument("--json", help="write the figures to this file, after every part")
    parser.add_argument("--plot", type=Path, help="draw them there (needs matplotlib)")


@contextmanager
def workspace(given: Path | None) -> Iterator[Path]:
    """Yield the directory to work in; a made-up one is removed."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="coldsnap-qualify-") as made:
        yield Path(made)
