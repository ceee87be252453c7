#!/usr/bin/env python3
"""Validate one weight pack, as a command: what ``COLDSNAP_PAYLOAD_VALIDATION_COMMAND`` may name.

It prints the admission as one line of JSON, or an error and exits 1. Run it on the host that holds the pack::

    python examples/verify_payload.py --path /srv/store/model-payloads/sha256/4b5c….pack --expected-sha256 sha256:4b5c…
"""

import argparse
import sys

from coldsnap.artifact import canonical, record
from coldsnap.artifact.admission import Admission, Request, decide, record_path
from coldsnap.artifact.service import failure
from coldsnap.errors import ArtifactError, FormatError


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="the pack, absolute")
    parser.add_argument("--record", help="where its record is: beside the pack, nowhere else")
    parser.add_argument("--expected-sha256", required=True, help="sha256:<64 hex>")
    parser.add_argument("--expected-bytes", type=int, default=0, help="size; 0: whatever it is")
    parser.add_argument("--worker", default="", help="repeated in the answer")
    parser.add_argument("--verify", choices=["evidence", "full"], default="evidence")
    return parser.parse_args()


def validated(options: argparse.Namespace) -> Admission:
    """Decide."""
    if options.record not in {None, record_path(options.path)}:
        raise FormatError("the record lies beside the pack", path=options.record, rule="validation.7")
    request = Request(
        path=options.path,
        expected_sha256=options.expected_sha256,
        expected_bytes=options.expected_bytes,
        worker=options.worker,
        verify=options.verify,
    )
    return decide(request)


def main() -> int:
    """Print the admission or the error."""
    try:
        print(canonical.encode(record.write(validated(arguments()))).decode())
    except (ArtifactError, OSError, ValueError) as error:
        print(canonical.encode({"error": record.write(failure(error))}).decode())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
