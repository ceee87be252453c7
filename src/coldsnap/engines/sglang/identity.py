"""What one scheduler is, as data: everything that must be the same where its memory is to be used again.

The one rule: nothing of the machine is in it that another machine of the same kind has not: no host, no address, no
serial number of a device, and of its memory the size in whole GiB.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any

from coldsnap.artifact import canonical
from coldsnap.engines.environment_probe import code_digest
from coldsnap.engines.sglang import contract
from coldsnap.keeper.directive import PLUGIN_ABI

__all__ = ["digest_of", "identity_of", "source_contract"]

_GIB = 1 << 30
_AXES = ("tp", "pp", "dp", "ep")


@functools.cache
def source_contract() -> str:
    """Return the digest of the sources that the plugin relies on, in the SGLang of this process."""
    import sglang  # noqa: PLC0415  only the engine's environment has it

    (tree,) = sglang.__path__
    return contract.source_digest(tree)


def identity_of(runner: Any, *, worker: str, rank: int) -> Mapping[str, Any]:
    """Describe the scheduler around a model runner.

    Args:
        runner: SGLang's ``ModelRunner`` of the target.
        worker: Its name.
        rank: Its number among all of its server.
    """
    import coldsnap  # noqa: PLC0415

    model, arguments = runner.model_config, runner.server_args
    hf_config = model.hf_config
    return {
        "plugin_abi": PLUGIN_ABI,
        "plugin_code_sha256": code_digest(os.path.dirname(str(coldsnap.__file__))),
        "engine": "sglang",
        "engine_version": importlib.metadata.version("sglang"),
        "engine_contract_sha256": source_contract(),
        **_torch(),
        "model_path": str(model.model_path),
        "model_revision": _text(getattr(model, "revision", None)),
        "model_commit_hash": _text(getattr(hf_config, "_commit_hash", None)),
        "architectures": list(hf_config.architectures or ()),
        "hf_config_sha256": canonical.sha256_of(hf_config.to_json_string(use_diff=False).encode()),
        "dtype": str(model.dtype),
        "quantization": _text(model.quantization),
        "parallel": {
            **{axis: int(getattr(arguments, f"{axis}_size", 1) or 1) for axis in _AXES},
            "global_rank": rank,
            "worker_id": worker,
        },
        "device": _device(),
    }


def digest_of(identity: Mapping[str, Any]) -> str:
    """Return the digest of an identity."""
    return canonical.digest(dict(identity))


def _torch() -> Mapping[str, Any]:
    import torch  # noqa: PLC0415  only the engine's environment has it

    driver = torch._C._cuda_getDriverVersion() if torch.cuda.is_available() else 0  # noqa: SLF001  it has no other name
    return {
        "torch_version": str(torch.__version__),
        "cuda_runtime": _text(torch.version.cuda),
        "cuda_driver_abi_major": int(driver) // 1000,
    }


def _device() -> Mapping[str, Any]:
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        return {"name": "cpu", "compute_capability": "", "capacity_class_bytes": 0}
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": str(found.name),
        "compute_capability": f"{found.major}.{found.minor}",
        "capacity_class_bytes": round(found.total_memory / _GIB) * _GIB,
    }


def _text(value: object) -> str:
    return "" if value is None else str(value)
