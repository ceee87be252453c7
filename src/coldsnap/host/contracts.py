"""What each snapshot driver asks of a host: the two contracts, and the features they name.

The one rule: a contract is data; whether a host fulfils it is said by ``unmet`` and ``selection``.
"""

from __future__ import annotations

from attrs import frozen

from coldsnap.host.facts import QualificationRecord

FEATURES = (
    "criu-process-template",
    "criu-process-tree",
    "cuda-fresh-state",
    "cuda-initialized-state",
    "cuda-checkpoint-api",
    "cuda-checkpoint-roundtrip",
    "cuda-classic-ipc",
    "cuda-vmm-exact-address",
    "cuda-uvm-checkpoint",
    "cuda-vmm-exported-handle-checkpoint",
    "nccl-communicator-suspend-in-place",
    "nccl-transport-detach-in-place",
    "nccl-graph-resource-retention",
    "nccl-registration-window-in-place-replay",
    "nccl-nvls-in-place-replay",
    "nccl-device-api-state-retention",
)
# 4.1 cannot dump an inet socket on a current kernel: SO_PASSCRED is refused there, and it does not cope.
MINIMUM_CRIU_VERSION = (4, 2)
STATUSES = ("passed", "failed", "unsupported", "unqualified")


@frozen(kw_only=True)
class DriverContract:
    """One snapshot driver.

    Attributes:
        id: Its name in plans and artifacts.
        capture_boundary: The state of the process when it is dumped.
        minimum_driver_major: NVIDIA driver needed on a host with a GPU.
        probed_driver_major: The same under ``compatibility.driver = "probed"``; ``None``: not lowered.
        features: Host features needed on a host with a GPU.
        states: What a restore may end in.
    """

    id: str
    capture_boundary: str
    minimum_driver_major: int
    probed_driver_major: int | None
    features: tuple[str, ...]
    states: tuple[str, ...]


CONTRACTS = {
    "n580": DriverContract(
        id="n580",
        capture_boundary="pre-cuda-process-template",
        minimum_driver_major=580,
        probed_driver_major=None,
        features=("criu-process-template", "cuda-fresh-state", "cuda-vmm-exact-address"),
        states=("running",),
    ),
    "n610": DriverContract(
        id="n610",
        capture_boundary="initialized-cuda-process-state",
        minimum_driver_major=610,
        # The checkpoint API is complete from this driver on; whether it keeps what one worker needs is probed.
        probed_driver_major=570,
        features=(
            "criu-process-tree",
            "cuda-checkpoint-api",
            "cuda-checkpoint-roundtrip",
            "cuda-classic-ipc",
            "cuda-initialized-state",
            "cuda-vmm-exact-address",
        ),
        states=("running", "warm"),
    ),
}


def unmet(contract: DriverContract, record: QualificationRecord) -> tuple[str, ...]:
    """Return a sentence for each feature of the contract that has not passed."""
    results = [record.result(name) for name in contract.features]
    return tuple(
        f"{result.name} is {result.status}" + (f": {result.reason}" if result.reason else "")
        for result in results
        if result.status != "passed"
    )
