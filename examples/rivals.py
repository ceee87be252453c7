"""Other loaders, on the same file: safetensors into GPU memory, the way their documents show.

The one rule: each gets the whole file and hands over every tensor on the device; none is tuned, none is handicapped.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["RIVALS", "missing"]


def safetensors(path: Path, device: str) -> Any:
    """Load with safetensors itself."""
    from safetensors.torch import load_file

    return load_file(path, device=device)


def instanttensor(path: Path, device: str) -> Any:
    """Load with InstantTensor, copies that outlive it."""
    from instanttensor import safe_open  # type: ignore[import-not-found]

    with safe_open(str(path), framework="pt", device=device) as file:
        return dict(file.tensors())


def instanttensor_views(path: Path, device: str) -> Any:
    """Load with InstantTensor, views into its buffer: the bytes arrive, nobody keeps them."""
    from instanttensor import safe_open

    with safe_open(str(path), framework="pt", device=device, copy=False) as file:
        return [name for name, _ in file.tensors()]


def fastsafetensors(path: Path, device: str) -> Any:
    """Load with fastsafetensors, without GPUDirect Storage."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup  # type: ignore[import-not-found]

    loader = SafeTensorsFileLoader(SingleGroup(), device, nogds=True)
    try:
        loader.add_filenames({0: [str(path)]})
        buffer = loader.copy_files_to_device()
        return {name: buffer.get_tensor(name) for name in buffer.key_to_rank_lidx}
    finally:
        loader.close()


def runai(path: Path, device: str) -> Any:
    """Load with the Run:ai streamer and move each tensor as it comes."""
    from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-not-found]

    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(path)])
        return {name: tensor.to(device, non_blocking=True) for name, tensor in streamer.get_tensors()}


RIVALS: dict[str, tuple[str, Callable[[Path, str], Any]]] = {
    "safetensors": ("safetensors", safetensors),
    "instanttensor": ("instanttensor", instanttensor),
    "instanttensor-views": ("instanttensor", instanttensor_views),
    "fastsafetensors": ("fastsafetensors", fastsafetensors),
    "runai": ("runai_model_streamer", runai),
}


def missing() -> list[str]:
    """Return what the comparison needs and this environment lacks, with the reason."""
    import importlib

    lacking = []
    for module in ["torch", *dict.fromkeys(module for module, _ in RIVALS.values())]:
        try:
            importlib.import_module(module)
        except ImportError as error:
            lacking.append(f"{module}: {error}")
    return lacking
