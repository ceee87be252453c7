"""A safetensors checkpoint for the reference engine.

The one rule: the same seed and size give the same file, byte for byte, without torch.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

__all__ = ["HIDDEN", "VOCABULARY", "write_checkpoint"]

VOCABULARY = 256
HIDDEN = 64


def write_checkpoint(path: str | os.PathLike[str], *, seed: int = 0, size_bytes: int = 1 << 20) -> Path:
    """Write a checkpoint; what is at the path is replaced.

    Args:
        path: Its file.
        seed: What the tensors are drawn from.
        size_bytes: About how large they are together.

    Returns:
        The path.
    """
    rows = max(1, size_bytes // HIDDEN - 2 * VOCABULARY - HIDDEN)
    shapes = {"ballast": rows, "embedding": VOCABULARY, "output": VOCABULARY, "recurrent": HIDDEN}
    header, end = {}, 0
    for name, count in shapes.items():
        begin, end = end, end + count * HIDDEN
        header[name] = {"dtype": "I8", "shape": [count, HIDDEN], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    data = random.Random(seed).randbytes(end)  # noqa: S311 - to be repeated, not to be secret
    target = Path(path)
    target.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return target
