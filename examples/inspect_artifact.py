#!/usr/bin/env python3
"""Look at artifacts and at the store, without a GPU, an engine or CRIU.

    python examples/inspect_artifact.py show artifacts/qwen3-8b
    python examples/inspect_artifact.py verify artifacts/qwen3-8b --store /srv/coldsnap [--full]
    python examples/inspect_artifact.py diff artifacts/monday artifacts/tuesday
    python examples/inspect_artifact.py store /srv/coldsnap
    python examples/inspect_artifact.py collect /srv/coldsnap artifacts overlays [--really]
    python examples/inspect_artifact.py delete artifacts/qwen3-8b --store /srv/coldsnap
        --roots artifacts overlays [--really]

``collect`` and ``delete`` only tell what they would do, unless ``--really`` is given.
"""

import argparse
import sys
from pathlib import Path

from coldsnap.artifact import Artifact
from coldsnap.artifact.collect import Collected, Deleted, collect, delete_artifact, verify_artifact
from coldsnap.artifact.difference import diff
from coldsnap.artifact.store import Store
from coldsnap.errors import ColdSnapError


def human(size: int) -> str:
    """Write a number of bytes with a unit, and exactly."""
    for unit, bytes_per in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= bytes_per:
            return f"{size / bytes_per:.2f} {unit} ({size:,})"
    return f"{size} bytes"


def show(options: argparse.Namespace) -> None:
    """Print what an artifact is, how big, and where it can be restored."""
    artifact = Artifact.open(options.artifact)
    what = artifact.descriptor
    print(f"{artifact.path}\n  identity      {artifact.digest}")
    print(f"  captured      {what.capture_id} by {what.snapshot_driver.id} ({what.snapshot_driver.boundary})")
    print(f"  engine        {what.engine.kind} {what.engine.version}, torch {what.engine.torch}")
    print(f"  model         {what.engine.model.id} at {what.engine.model.revision}")
    print(f"  weights       {what.weights.kind}")
    for unit in what.compatibility.units:
        devices = ", ".join(device.gpu_name for device in unit.devices) or "no GPU"
        print(f"  unit {unit.unit:9}{unit.architecture}, Linux {unit.kernel}, {devices}")
    for capsule in what.capsule.units:
        print(f"  processes     {len(capsule.pids)}, CRIU {capsule.criu.version}, {len(capsule.files)} files")
    for kind, size in artifact.size_bytes.items():
        print(f"  {kind:14}{human(size)}")
    print(f"  question      {what.acceptance.prompt!r}\n  answer        {what.acceptance.text!r}")


def verify(options: argparse.Namespace) -> None:
    """Verify every file and every pack, and prove coverage."""
    artifact = Artifact.open(options.artifact)
    store = Store(options.store) if options.store else None
    verified = verify_artifact(artifact, store, "full" if options.full else "evidence")
    read = verified.files.bytes_hashed + sum(pack.validation.bytes_hashed for pack in verified.packs)
    print(
        f"{len(verified.files.files)} files and {len(verified.packs)} packs are right; {human(read)} read in ", end=""
    )
    print(f"{verified.seconds:.3f} s")
    print("\n".join(verified.coverage))


def compare(options: argparse.Namespace) -> None:
    """Print in what two artifacts differ and what they share."""
    print(diff(Artifact.open(options.left), Artifact.open(options.right)))


def inventory(options: argparse.Namespace) -> None:
    """List the packs of a store."""
    store = Store(options.store)
    for pack in store.packs():
        print(f"{pack.sha256}  {human(pack.bytes)}{'' if pack.evidence else '  never verified here'}")
    for kind, size in store.size_bytes.items():
        print(f"{kind:10}{human(size)}")


def sweep(options: argparse.Namespace) -> None:
    """Collect garbage, or tell."""
    store = Store(options.store)
    told(collect(store, options.roots, grace_s=options.grace_s, dry_run=not options.really))


def told(done: Collected) -> None:
    """Print what garbage collection did."""
    word = "would remove" if done.dry_run else "removed"
    for pack in done.removed:
        print(f"{word} {pack.sha256}  {human(pack.bytes)}")
    for path in done.partials:
        print(f"{word} {path.name}")
    for sha256, reason in done.kept:
        print(f"kept {sha256}: {reason}")
    print(f"{word} {human(done.bytes)}")


def delete(options: argparse.Namespace) -> None:
    """Delete an artifact, or tell."""
    artifact = Artifact.open(options.artifact)
    store = Store(options.store) if options.store else None
    gone: Deleted = delete_artifact(artifact, store, options.roots, dry_run=not options.really)
    word = "deleted" if options.really else "would delete"
    for sha256 in gone.packs_deleted:
        print(f"{word} pack {sha256}")
    for sha256, reason in gone.packs_left:
        print(f"left pack {sha256}: {reason}")
    print(f"{word} {artifact.path}, {human(gone.bytes)}")


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = made.add_subparsers(required=True)

    def command(name: str, run: object, *paths: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name)
        one.set_defaults(run=run)
        for path in paths:
            one.add_argument(path, type=Path)
        return one

    command("show", show, "artifact")
    one = command("verify", verify, "artifact")
    one.add_argument("--store", type=Path)
    one.add_argument("--full", action="store_true", help="read everything, whatever the evidence says")
    command("diff", compare, "left", "right")
    command("store", inventory, "store")
    one = command("collect", sweep, "store")
    one.add_argument("roots", type=Path, nargs="+", help="every directory that holds artifacts or overlays")
    one.add_argument("--grace-s", type=float, default=24 * 3600.0, help="keep what was used less than this ago, s")
    one.add_argument("--really", action="store_true")
    one = command("delete", delete, "artifact")
    one.add_argument("--store", type=Path)
    one.add_argument("--roots", type=Path, nargs="*", default=[], help="where else artifacts may name the same packs")
    one.add_argument("--really", action="store_true")
    return made


def main() -> int:
    """Run one command."""
    options = parser().parse_args()
    try:
        options.run(options)
    except ColdSnapError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
