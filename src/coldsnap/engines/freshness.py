"""Randomness that lies in a process and that nobody can have seeded: made fresh in a clone.

The one rule: only the standard library is needed, and what the process has not loaded is not loaded for this.
"""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["freshen"]


def freshen() -> tuple[str, ...]:
    """Give this process randomness of its own where a clone would repeat what others do, and nobody can have seeded it.

    ``uuid4``, ``secrets`` and ``SystemRandom`` ask the kernel each time and need nothing.

    Returns:
        The names of what was made fresh.
    """
    # C libraries draw names and jitter from these two; srand(3) and srandom(3) are one state.
    libc = ctypes.CDLL(None)
    libc.srandom(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))
    libc.srand48(ctypes.c_long(int.from_bytes(os.urandom(4), "little")))
    done = ["libc"]
    if (ssl := sys.modules.get("ssl")) is not None:
        ssl.RAND_add(os.urandom(64), 64.0)  # OpenSSL's generator lives in the process: keys and nonces of clones
        done.append("openssl")
    if getattr(sys.modules.get("tempfile"), "_name_sequence", None) is not None:
        # It is made anew in another pid only, and a restored process has the pid that it had.
        vars(sys.modules["tempfile"])["_name_sequence"] = None
        done.append("tempfile")
    return tuple(done)
