"""Bytes at rest: artifacts, packs, the store, and the evidence that they are what they were.

The one rule: a reader of this package raises nothing but ArtifactError, whatever the bytes are. Formats are
documented in ``docs/format``; what a caller needs is here.
"""

from __future__ import annotations

from coldsnap.artifact.capsule import (
    CacheSeed,
    Capsule,
    CapsuleUnit,
    Criu,
    CriuOptions,
    FileRecord,
    Listener,
    LogFile,
    Pages,
    VolatileFile,
)
from coldsnap.artifact.committed import Artifact
from coldsnap.artifact.compatibility import Comparison, Target, TargetCriu, TargetEngine, TargetUnit
from coldsnap.artifact.descriptor import (
    Acceptance,
    Calibration,
    Compatibility,
    CompatibilityUnit,
    Descriptor,
    Device,
    Engine,
    Graph,
    Model,
    Python,
    Requires,
    SnapshotDriver,
    Topology,
    TopologyUnit,
)
from coldsnap.artifact.durable import remove_committed, remove_uncommitted
from coldsnap.artifact.evidence import Admitted, TreeAdmission
from coldsnap.artifact.payloads import Weights
from coldsnap.artifact.writer import ArtifactWriter

__all__ = [
    "Acceptance",
    "Admitted",
    "Artifact",
    "ArtifactWriter",
    "CacheSeed",
    "Calibration",
    "Capsule",
    "CapsuleUnit",
    "Comparison",
    "Compatibility",
    "CompatibilityUnit",
    "Criu",
    "CriuOptions",
    "Descriptor",
    "Device",
    "Engine",
    "FileRecord",
    "Graph",
    "Listener",
    "LogFile",
    "Model",
    "Pages",
    "Python",
    "Requires",
    "SnapshotDriver",
    "Target",
    "TargetCriu",
    "TargetEngine",
    "TargetUnit",
    "Topology",
    "TopologyUnit",
    "TreeAdmission",
    "VolatileFile",
    "Weights",
    "remove_committed",
    "remove_uncommitted",
]
