#!/usr/bin/env python3
"""Publish an artifact, and fetch it on another host: packs through a hub, the rest through an OCI registry.

    python examples/publish.py packs artifacts/qwen3-8b --store /srv/coldsnap --repository team/packs [--create]
    python examples/publish.py capsule artifacts/qwen3-8b registry.example:5000/team/qwen3-8b:v1
    python examples/publish.py fetch registry.example:5000/team/qwen3-8b:v1 artifacts/qwen3-8b
        --store /srv/coldsnap --repository team/packs --revision 40HEX

Publishing again sends nothing. ``fetch`` brings the capsule, then each worker's pack; a download that was interrupted
goes on. The hub's client finds its token as it always does.
"""

import argparse
import sys
from pathlib import Path

from coldsnap.artifact import Artifact
from coldsnap.artifact.hub import Hub
from coldsnap.artifact.oci import pull, push
from coldsnap.artifact.payloads import PayloadObject
from coldsnap.artifact.store import Store
from coldsnap.errors import ColdSnapError


def payloads(artifact: Artifact) -> tuple[PayloadObject, ...]:
    """Return the packs that an artifact names."""
    section = artifact.descriptor.weights.payloads
    return section.objects if section is not None else ()


def packs(options: argparse.Namespace) -> None:
    """Publish the packs, and print the revision that a policy needs."""
    hub = Hub(repository=options.repository, endpoint=options.endpoint)
    artifact = Artifact.open(options.artifact)
    done = hub.publish(payloads(artifact), Store(options.store), create=options.create)
    print(f"{len(done.uploaded)} packs sent ({done.bytes:,} bytes), {len(done.present)} were there")
    print(f'[weights.native]\nrepository = "{done.repository}"\nrevision = "{done.revision}"')


def capsule(options: argparse.Namespace) -> None:
    """Push everything but the packs, and print the exact reference."""
    print(push(Artifact.open(options.artifact), options.reference, insecure=options.insecure))


def fetch(options: argparse.Namespace) -> None:
    """Pull the capsule and stage the packs."""
    artifact = pull(options.reference, options.output, insecure=options.insecure)
    print(f"{artifact.path}: {artifact.digest}")
    for item in payloads(artifact):
        hub = Hub(repository=options.repository, endpoint=options.endpoint)
        admission = hub.stage(item, Store(options.store), options.revision)
        print(f"worker {item.worker}: {admission.path} ({admission.validation.reason})")


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = made.add_subparsers(required=True)
    one = commands.add_parser("packs")
    one.set_defaults(run=packs)
    one.add_argument("artifact", type=Path)
    one.add_argument("--store", type=Path, required=True)
    one.add_argument("--repository", required=True)
    one.add_argument("--endpoint", help="another hub than the client's own")
    one.add_argument("--create", action="store_true", help="make the repository, private, when it does not exist")
    two = commands.add_parser("capsule")
    two.set_defaults(run=capsule)
    two.add_argument("artifact", type=Path)
    two.add_argument("reference")
    two.add_argument("--insecure", action="store_true", help="plain HTTP")
    three = commands.add_parser("fetch")
    three.set_defaults(run=fetch)
    three.add_argument("reference")
    three.add_argument("output", type=Path)
    three.add_argument("--insecure", action="store_true", help="plain HTTP")
    three.add_argument("--store", type=Path)
    three.add_argument("--repository")
    three.add_argument("--revision")
    three.add_argument("--endpoint")
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
