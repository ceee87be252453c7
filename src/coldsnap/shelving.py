"""The steps of what is done to artifacts at rest: verify, delete, publish. Plain fields, like every step.

The one rule: ``open`` comes first and names the artifact; the others are about the one that it opened.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from attrs import frozen

from coldsnap.phases import BaseStep, Phase

__all__ = [
    "AdmitDeletion",
    "CollectPacks",
    "DeleteArtifact",
    "FetchPacks",
    "OpenArtifact",
    "PublishPacks",
    "PushArtifact",
    "RepackCheckpoint",
    "ShelvingStep",
    "VerifyArtifact",
]


@frozen(kw_only=True)
class OpenArtifact(BaseStep):
    """Open the artifact that was planned for, and refuse another in its place."""

    phase: ClassVar[Phase] = "ADMIT"
    artifact: str
    digest: str


@frozen(kw_only=True)
class VerifyArtifact(BaseStep):
    """Admit every file and every pack, and prove again that they cover every byte.

    Attributes:
        store: The root of the store, empty when no pack is named.
        mode: evidence (digest what has none) or full (digest all).
    """

    phase: ClassVar[Phase] = "ADMIT"
    store: str
    mode: Literal["evidence", "full"]


@frozen(kw_only=True)
class AdmitDeletion(BaseStep):
    """Check that no capture is writing what would go, and that every other owner of its packs can be read.

    Attributes:
        roots: Where other artifacts of the store are, empty when packs stay.
    """

    phase: ClassVar[Phase] = "ADMIT"
    roots: tuple[str, ...]


@frozen(kw_only=True)
class DeleteArtifact(BaseStep):
    """Let the directory stop being an artifact, by one rename, then remove it."""

    phase: ClassVar[Phase] = "SETTLE"
    dry_run: bool


@frozen(kw_only=True)
class CollectPacks(BaseStep):
    """Delete the packs of the artifact that nothing else names.

    Attributes:
        store: The root of the store.
        roots: Where other artifacts of the store are.
    """

    phase: ClassVar[Phase] = "SETTLE"
    store: str
    roots: tuple[str, ...]
    dry_run: bool


@frozen(kw_only=True)
class PublishPacks(BaseStep):
    """Send the packs that the repository lacks, and resolve its revision."""

    phase: ClassVar[Phase] = "PUBLISH"
    store: str
    repository: str
    endpoint: str
    create: bool


@frozen(kw_only=True)
class FetchPacks(BaseStep):
    """Fetch the packs that the store lacks from the repository that has them; one that is there is not fetched.

    Attributes:
        store: The root of the store.
        repository: ``owner/name``.
        revision: The 40-hex commit.
        endpoint: Another hub than the client's own; empty: that one.
        files: Worker and its file in the repository; empty: the paths that the artifact records.
    """

    phase: ClassVar[Phase] = "ADMIT"
    store: str
    repository: str
    revision: str
    endpoint: str
    files: tuple[tuple[str, str], ...]


@frozen(kw_only=True)
class RepackCheckpoint(BaseStep):
    """Write the packs that the store lacks out of the pinned checkpoint, each under its digest or not at all.

    Attributes:
        store: The root of the store.
    """

    phase: ClassVar[Phase] = "SETTLE"
    store: str


@frozen(kw_only=True)
class PushArtifact(BaseStep):
    """Verify the artifact and push it, without its packs, to a registry."""

    phase: ClassVar[Phase] = "PUBLISH"
    reference: str
    insecure: bool


ShelvingStep = (
    OpenArtifact
    | VerifyArtifact
    | AdmitDeletion
    | DeleteArtifact
    | CollectPacks
    | PublishPacks
    | FetchPacks
    | RepackCheckpoint
    | PushArtifact
)
