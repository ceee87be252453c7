#!/usr/bin/env python3
"""Serve validations of weight packs to other processes of this user, on a private Unix socket.

    python examples/serve_validation.py --socket /run/user/1000/coldsnap-validate.sock --token-file /run/user/1000/token

The token file is made when it does not exist. Point clients at both with
``Transport(name="rpc", rpc_socket=…, rpc_token_file=…)``. Ctrl-C ends it.
"""

import argparse
import contextlib
from pathlib import Path

from coldsnap.artifact.service import ValidationService, write_token


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, default=2, help="validations at once, 1 to 64")
    options = parser.parse_args()

    if not options.token_file.exists():
        write_token(options.token_file)
    service = ValidationService(options.socket, options.token_file, concurrency=options.concurrency)
    print(f"listening on {options.socket}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        service.serve_forever()
    service.close()


if __name__ == "__main__":
    main()
