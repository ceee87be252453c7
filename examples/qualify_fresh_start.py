"""An engine that is started anew without its checkpoint: captured, its model directory renamed, restored, compared.

    python examples/qualify_fresh_start.py MODEL DIRECTORY [--restores 3] [--python ENGINE_PYTHON] [--criu CRIU]
        [--other-driver] [--json FILE] [-- ENGINE ARGUMENTS]

MODEL is a model directory; it is renamed to MODEL.away while restores run, and back at the end, whatever happens.
DIRECTORY gets artifacts and store. Each restore must answer with the recorded tokens and read exactly the pack. With
``--other-driver`` the same engine is captured by n610, too: both packs must be one.
"""

from __future__ import annotations

import argparse
import json
import platform
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import coldsnap as cs

PAGE_BYTES = 4096


def main(argv: Sequence[str] | None = None) -> int:
    """Capture, restore, print the figures."""
    options = arguments(argv)
    engine = cs.VLLM(options.model, args=options.args, python=options.python)
    try:
        found = qualify(engine, options)
    except cs.ColdSnapError as error:
        print(f"not qualified: {error}", file=sys.stderr)
        return 1
    print(table(found))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))
    return 0 if found["exact"] and found["pack_read_exactly"] and found.get("one_pack", True) else 1


def qualify(engine: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return what was measured.

    Raises:
        ColdSnapError: A capture or a restore was refused, or failed.
    """
    directory = Path(options.directory)
    directory.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    facts = cs.probe(criu=options.criu)
    captured = _capture(engine, directory / "template", "n580", facts)
    found: dict[str, Any] = {
        "machine": f"{platform.machine()}, Linux {platform.release()}, {len(facts.host('local').gpus)} GPUs",
        "capture_s": time.monotonic() - began,
        "restores": [],
    }
    artifact = cs.Artifact.open(captured)
    packs = _packs(artifact)
    found |= {
        "pack": ", ".join(artifact.packs),
        "pack_file_bytes": packs,
        "artifact_bytes": sum(artifact.size_bytes.values()),
    }
    if options.other_driver:
        other = cs.Artifact.open(_capture(engine, directory / "process", "probed", facts))
        found["one_pack"] = other.packs == artifact.packs
    with away(Path(options.model)):
        for _ in range(options.restores):
            found["restores"].append(_restored(artifact, facts))
    restores = found["restores"]
    found["exact"] = len(restores) == options.restores  # a restore that answers otherwise raises
    found["pack_read_exactly"] = all(0 <= packs - one["pack_moved_bytes"] < _padding(packs) for one in restores)
    return found


def _capture(engine: Any, output: Path, driver: str, facts: Any) -> Path:
    policy = cs.Policy().evolve(**{"compatibility.driver": driver})
    operation = cs.Capture(engine, output=output, placement=cs.local(port=_port()), store=str(output.parent / "store"))
    cs.execute(cs.resolve(policy, operation, facts), on_event=cs.progress())
    return output


def _restored(artifact: Any, facts: Any) -> dict[str, float]:
    began = time.monotonic()
    store = str(artifact.path.parent / "store")
    operation = cs.Restore(artifact, placement=cs.local(port=_port()), store=store)
    report = cs.execute(cs.resolve(cs.Policy(), operation, facts), on_event=cs.progress())
    seconds = time.monotonic() - began
    with report.serving as running:
        running.stop()
    details = report.receipt("report").details
    return {"restore_s": seconds, **{name: float(value) for name, value in details.items()}}


@contextmanager
def away(model: Path) -> Iterator[None]:
    """Have the model's directory under another name for a while."""
    elsewhere = model.with_name(f"{model.name}.away")
    model.rename(elsewhere)
    try:
        yield
    finally:
        elsewhere.rename(model)


def _packs(artifact: cs.Artifact) -> int:
    """Return the size of the packs of all workers, bytes."""
    payloads = artifact.descriptor.weights.payloads
    return sum(payload.bytes for payload in payloads.objects) if payloads is not None else 0


def _padding(packs: int) -> int:
    """Return an upper bound of what extents are padded by, bytes: each ends within a page."""
    return packs // 100 + 1024 * PAGE_BYTES


def table(found: dict[str, Any]) -> str:
    """Return the figures as text."""
    lines = [f"machine: {found['machine']}", f"capture {found['capture_s']:.1f} s, pack {found['pack'][:19]}"]
    for number, one in enumerate(found["restores"], 1):
        lines.append(
            f"restore {number}: {one['restore_s']:6.2f} s, read {one['pack_moved_bytes']:,.0f} of "
            f"{found['pack_file_bytes']:,} bytes of the pack in {one.get('pack_s', 0.0):.3f} s, "
            f"matched in {one.get('match_s', 0.0):.3f} s"
        )
    lines.append(f"token ids after every restore, the checkpoint gone: {'identical' if found['exact'] else 'NOT'}")
    if "one_pack" in found:
        lines.append(f"pack of the other driver: {'the same' if found['one_pack'] else 'ANOTHER'}")
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model directory; renamed while restores run")
    parser.add_argument("directory", help="for artifacts and store; must not have them")
    parser.add_argument("--restores", type=int, default=3)
    parser.add_argument("--python", default=sys.executable, help="interpreter that vLLM is installed in")
    parser.add_argument("--criu", help="CRIU 4.2 or newer; looked for when not given")
    parser.add_argument("--other-driver", action="store_true", help="capture by n610, too, and compare the packs")
    parser.add_argument("--json", help="write the figures there")
    parser.add_argument("args", nargs="*", help="arguments of vLLM, after --")
    return parser.parse_intermixed_args(argv)


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
