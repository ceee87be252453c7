"""The files that an engine needs to start with a model, beside the tensors.

The one rule: what is in them decides what the engine makes of a model; no tensor is among them. A safetensors file is
there as its header: engines read headers before they load, for types that a configuration does not say.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from coldsnap.engines.model import TEXT_SUFFIXES, read_config
from coldsnap.errors import AdmissionError
from coldsnap.transfer.safetensors import HEADER_LIMIT_BYTES

__all__ = ["MAX_FILE_BYTES", "header_of", "placed_model", "start_files"]

MAX_FILE_BYTES = 256 << 20
_LENGTH_BYTES = 8


def start_files(directory: str | os.PathLike[str]) -> dict[str, bytes]:
    """Read what is needed to start with a model.

    Args:
        directory: Of a checkpoint; links (as in the hub's cache) are followed.

    Returns:
        Contents by name.

    Raises:
        AdmissionError: There is no configuration, a file cannot be read, or it is larger than such files are.
    """
    root = Path(directory)
    read_config(root)
    files: dict[str, bytes] = {}
    try:
        for name in sorted(os.listdir(root)):
            if name.endswith(TEXT_SUFFIXES):
                files[name] = _contents(root / name)
            elif name.endswith(".safetensors"):
                files[name] = header_of(root / name)
    except OSError as error:
        raise AdmissionError(f"the model directory {root} cannot be read: {error}") from error
    return files


def _contents(path: Path) -> bytes:
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise AdmissionError(
            f"{path} has {size:,} bytes, expected at most {MAX_FILE_BYTES:,} of a file that is no tensor"
        )
    return path.read_bytes()


def header_of(path: Path) -> bytes:
    """Read the header of a safetensors file, with its length before it.

    Raises:
        AdmissionError: It has none, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            prefix = file.read(_LENGTH_BYTES)
            length = int.from_bytes(prefix, "little")
            header = file.read(length) if length <= HEADER_LIMIT_BYTES else b""
    except OSError as error:
        raise AdmissionError(f"{path} cannot be read: {error.strerror}") from error
    if len(prefix) < _LENGTH_BYTES or len(header) != length:
        raise AdmissionError(f"{path} is not a safetensors file: its header would have {length:,} bytes")
    return prefix + header


def placed_model(argv: Sequence[str], option: str, directory: str, *, served: str) -> tuple[str, ...]:
    """Return the command of an engine with its model in another directory, under the name that it had in the API.

    Args:
        argv: The command; it has the option once.
        option: What names the model.
        directory: Where its start files are; they have no revision any more.
        served: The name in the API.
    """
    placed = list(argv)
    placed[placed.index(option) + 1] = directory
    if "--revision" in placed:
        at = placed.index("--revision")
        del placed[at : at + 2]
    named = () if "--served-model-name" in placed else ("--served-model-name", served)
    return (*placed, *named)
