"""Plans for artifacts at rest: verify, delete, publish.

The one rule: pure, and nothing is guessed: a store, the roots that hold its artifacts, and where to publish are named
by the user or play no part, and the plan says which.
"""

from __future__ import annotations

from typing import cast

from coldsnap.admission import require
from coldsnap.artifact import Artifact
from coldsnap.operation import Delete, Publish, Verify
from coldsnap.plan import Decision, Plan
from coldsnap.planning.decisions import native_decisions
from coldsnap.policy import ResolvedPolicy
from coldsnap.steps import (
    AdmitDeletion,
    CollectPacks,
    DeleteArtifact,
    OpenArtifact,
    PublishPacks,
    PushArtifact,
    Step,
    VerifyArtifact,
)

__all__ = ["plan_deletion", "plan_publication", "plan_verification"]


def plan_verification(resolved: ResolvedPolicy, operation: Verify) -> Plan:
    """Plan a verification.

    Raises:
        AdmissionError: The artifact names packs, and no store was named.
    """
    artifact = cast("Artifact", operation.artifact)
    needs = bool(artifact.packs)
    if needs and operation.store is None:
        require(f"{artifact.path} cannot be verified", [f"it names {_packs(artifact)}; name the store that has them"])
    mode = operation.verify or resolved["weights.verify"]
    return _plan(
        "verify",
        artifact,
        [
            VerifyArtifact(
                id="verify", after=("open",), store=operation.store if needs and operation.store else "", mode=mode
            )
        ],
        Decision(
            name="weights.verify",
            requested=mode,
            layer="user" if operation.verify else resolved.provenance["weights.verify"],
            effective=mode,
            reason="files with valid evidence are admitted by stat" if mode == "evidence" else "every byte is read",
        ),
        _decided("packs", *(("verified", _packs(artifact)) if needs else ("left out", "the artifact names no pack"))),
        *native_decisions(resolved),
    )


def plan_deletion(operation: Delete) -> Plan:
    """Plan a deletion, or what tells what one would do."""
    artifact, dry_run = cast("Artifact", operation.artifact), operation.dry_run
    store = operation.store if operation.store and artifact.packs else ""
    steps: list[Step] = [
        AdmitDeletion(id="admit-deletion", after=("open",), roots=operation.roots if store else ()),
        DeleteArtifact(id="delete", after=("admit-deletion",), dry_run=dry_run),
    ]
    if store:
        collect = CollectPacks(id="packs", after=("delete",), store=store, roots=operation.roots, dry_run=dry_run)
        steps.append(collect)
        packs = _decided("packs", "deleted unless named elsewhere", f"{_packs(artifact)}, store {store}")
    elif artifact.packs:
        packs = _decided("packs", "left", f"{_packs(artifact)}, and no store was named")
    else:
        packs = _decided("packs", "left out", "the artifact names no pack")
    told = "nothing is touched" if dry_run else "what goes does not come back"
    return _plan("delete", artifact, steps, _decided("dry run", "yes" if dry_run else "no", told), packs)


def plan_publication(operation: Publish) -> Plan:
    """Plan a publication: packs first, so that whoever finds the artifact finds them too.

    Raises:
        AdmissionError: A repository for packs was named, and the artifact names no pack.
    """
    artifact = cast("Artifact", operation.artifact)
    steps: list[Step] = []
    if operation.repository and operation.store:
        if not artifact.packs:
            require(f"{artifact.path} has nothing for {operation.repository}", ["it names no pack; leave it out"])
        steps.append(
            PublishPacks(
                id="packs",
                after=("open",),
                store=operation.store,
                repository=operation.repository,
                endpoint=operation.endpoint or "",
                create=operation.create,
            )
        )
    if operation.reference:
        steps.append(
            PushArtifact(
                id="push",
                after=("packs",) if steps else ("open",),
                reference=operation.reference,
                insecure=operation.insecure,
            )
        )
    if operation.repository:
        packs = _decided("packs", "published", f"{_packs(artifact)}, each at most once")
    else:
        packs = _decided("packs", "left out", "no repository was named" if artifact.packs else "there is none")
    return _plan("publish", artifact, steps, packs)


def _plan(operation: str, artifact: Artifact, steps: list[Step], *decisions: Decision) -> Plan:
    return Plan(
        operation=operation,
        driver="none",
        subject=f"{artifact.descriptor.engine.kind} {artifact.descriptor.engine.model.id} in {artifact.path}",
        steps=(OpenArtifact(id="open", artifact=str(artifact.path), digest=artifact.digest), *steps),
        decisions=decisions,
    )


def _packs(artifact: Artifact) -> str:
    count = len(artifact.packs)
    return f"{count} pack{'s' * (count != 1)}"


def _decided(name: str, effective: str, reason: str) -> Decision:
    return Decision(name=name, requested="", layer="", effective=effective, reason=reason)
