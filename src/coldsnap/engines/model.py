"""The identity of a model: what exactly an engine serves.

A model of the hub is its repository and an immutable revision. A local directory has an identity too: a digest over its
configuration and tokenizer, the headers of its safetensors files and the digest of every one of them.

The one rule: two directories with the same identity give the same tensors and the same tokens.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen

from coldsnap.artifact.canonical import digest, sha256_of
from coldsnap.artifact.cores import in_threads
from coldsnap.artifact.hashing import sha256_fd
from coldsnap.errors import AdmissionError

__all__ = ["TEXT_SUFFIXES", "ModelFile", "ModelIdentity", "hub_snapshot", "identify_directory", "identify_hub"]

REVISION = re.compile(r"[0-9a-f]{40}")

# What decides tokens besides the tensors. Everything else in a model directory (README, images, other formats) does
# not.
TEXT_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_HEADER_BYTES = 256 << 20


@frozen(kw_only=True)
class ModelFile:
    """One file that decides what a model answers.

    Attributes:
        name: Relative to the model's directory.
        bytes: Its size.
        sha256: ``sha256:<hex>`` of its bytes.
        header: ``sha256:<hex>`` of a safetensors header, empty for other files.
    """

    name: str
    bytes: int
    sha256: str
    header: str = ""


@frozen(kw_only=True)
class ModelIdentity:
    """What exactly is served.

    Attributes:
        kind: ``hub`` or ``local``.
        model: Repository of the hub, or path of the directory; provenance for a local model.
        revision: 40 hex digits of a commit, or ``sha256:<hex>`` over all files of a local model.
        architecture: The first entry of ``architectures`` in its configuration.
        files: The files of a local model; empty for one of the hub.
    """

    kind: Literal["hub", "local"]
    model: str
    revision: str
    architecture: str
    files: tuple[ModelFile, ...] = field(default=(), repr=False)

    def differences(self, other: ModelIdentity) -> tuple[str, ...]:
        """Return in words how another model differs; a local path is not a difference, its contents are."""
        if self.kind != other.kind or (self.kind == "hub" and self.model != other.model):
            return (f"model: captured {self.kind} {self.model}, found {other.kind} {other.model}",)
        if self.revision == other.revision:
            return ()
        if self.kind == "hub":
            return (f"model revision: captured {self.revision}, found {other.revision}",)
        mine, theirs = ({file.name: file for file in one.files} for one in (self, other))
        names = sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name))
        return tuple(f"model file {name}: {_change(mine.get(name), theirs.get(name))}" for name in names)


def _change(captured: ModelFile | None, found: ModelFile | None) -> str:
    if captured is None:
        return "not there at capture"
    return "missing" if found is None else "other contents than at capture"


def identify_directory(path: str | os.PathLike[str]) -> ModelIdentity:
    """Read the identity of a local model.

    Args:
        path: Its directory.

    Raises:
        AdmissionError: The directory, its configuration or its weights are missing or not readable.
    """
    directory = Path(path)
    config = read_config(directory)
    names = sorted(name for name in os.listdir(directory) if name.endswith(TEXT_SUFFIXES + _WEIGHT_SUFFIXES))
    if not any(name.endswith(_WEIGHT_SUFFIXES) for name in names):
        raise AdmissionError(f"the model directory {directory} has no weights ({', '.join(_WEIGHT_SUFFIXES)})")
    try:
        files = tuple(in_threads(lambda name: _identify_file(directory, name), names))
    except OSError as error:
        raise AdmissionError(f"the model directory {directory} cannot be read: {error}") from error
    revision = digest([[file.name, file.bytes, file.sha256, file.header] for file in files])
    return ModelIdentity(
        kind="local", model=str(directory), revision=revision, architecture=_architecture(config), files=files
    )


def identify_hub(model: str, revision: str, cache: str | os.PathLike[str]) -> ModelIdentity:
    """Read the identity of a model of the hub from the local cache; nothing is fetched.

    Args:
        model: ``organisation/name``.
        revision: 40 hex digits.
        cache: The hub's cache directory, with ``models--organisation--name`` inside.

    Raises:
        AdmissionError: That revision is not in the cache.
    """
    snapshot = hub_snapshot(model, revision, cache)
    if not snapshot.is_dir():
        fetch = f"huggingface_hub.snapshot_download({model!r}, revision={revision!r})"
        raise AdmissionError(
            f"{model} at {revision} is not in the cache {cache}; engines are started offline, run {fetch}"
        )
    return ModelIdentity(kind="hub", model=model, revision=revision, architecture=_architecture(read_config(snapshot)))


def hub_snapshot(model: str, revision: str, cache: str | os.PathLike[str]) -> Path:
    """Return the directory in which the hub's local cache has a model, if it has it.

    Args:
        model: ``organisation/name``.
        revision: 40 hex digits.
        cache: The hub's cache directory.
    """
    return Path(cache, f"models--{model.replace('/', '--')}", "snapshots", revision)


def read_config(directory: Path) -> Mapping[str, Any]:
    """Read ``config.json`` of a model.

    Raises:
        AdmissionError: The directory or the file is missing, or the file is not a JSON object.
    """
    if not directory.is_dir():
        hint = "for a model of the hub, give revision= with the 40 hex digits of a commit"
        raise AdmissionError(f"the model directory {directory} does not exist; {hint}")
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise AdmissionError(f"{path} does not exist; expected the directory of a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise AdmissionError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdmissionError(f"{path} holds {type(config).__name__}, expected a JSON object")
    return config


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else str(config.get("model_type", "unknown"))


def _identify_file(directory: Path, name: str) -> ModelFile:
    fd = os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{name} is not a regular file")
        header = _header_digest(fd, name, status.st_size) if name.endswith(".safetensors") else ""
        return ModelFile(name=name, bytes=status.st_size, sha256=sha256_fd(fd, status.st_size), header=header)
    finally:
        os.close(fd)


def _header_digest(fd: int, name: str, size_bytes: int) -> str:
    # safetensors: 8 bytes little-endian length, then that many bytes of JSON, then the tensors.
    prefix = os.pread(fd, 8, 0)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
    if not 2 <= length <= min(_HEADER_BYTES, size_bytes - 8):
        raise OSError(f"{name} is not a safetensors file: its header would have {length} of {size_bytes} bytes")
    return sha256_of(os.pread(fd, length, 8))
