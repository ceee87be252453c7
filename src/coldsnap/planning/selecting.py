"""Who brings the weights of a restore: packs, the checkpoint, or the process image.

The one rule: only a pack that is absent lets ``auto`` recover. One that is there and is another, or is damaged, is an
error wherever it is found.
"""

from __future__ import annotations

from typing import Literal

from attrs import evolve, frozen

from coldsnap.artifact import Artifact
from coldsnap.behaviour import engine_defaults
from coldsnap.errors import PayloadMissingError, UnsupportedError
from coldsnap.host.facts import Facts
from coldsnap.plan import Choice
from coldsnap.planning.weights import PlacedWeights
from coldsnap.policy import Policy

__all__ = [
    "EITHER_RULE",
    "Source",
    "at_restore",
    "configured_repository",
    "fetch_required",
    "fetched_from",
    "foresee",
    "provider_choices",
    "provider_of",
    "published_in",
]

EITHER_RULE = "packs where the store has them all; where one is absent, the checkpoint; one that is another is an error"


@frozen(kw_only=True)
class Source:
    """Where packs are fetched from.

    Attributes:
        repository: ``owner/name``.
        revision: The 40-hex commit.
        files: Worker and its file in the repository; empty: the paths that the artifact records.
    """

    repository: str
    revision: str
    files: tuple[tuple[str, str], ...]


def at_restore(policy: Policy, artifact: Artifact, *, gpu: bool) -> PlacedWeights:
    """Settle where the weights of an artifact come from.

    Raises:
        UnsupportedError: The policy says where they are, and they are not there; or they would move in a way that
            there is not.
    """
    weights, mode = artifact.descriptor.weights, policy.resolved()["weights.mode"]
    if artifact.descriptor.snapshot_driver.id == "n580":
        return _started(policy, artifact)
    outside = weights.kind == "packs"
    resolved = policy.resolved(engine_defaults=engine_defaults(native=outside, policy=policy))
    if not outside:
        _require(mode in ("auto", "cache-only-auto", "image"), artifact, "in the process image", ("auto", "image"))
        return PlacedWeights(resolved=resolved, native=False, reason="the artifact has them in the process image")
    if resolved["io.hydration_backend"] == "gds" and not gpu:
        raise UnsupportedError(
            f"the weights of {artifact.path} belong into host memory, where GDS cannot bring them",
            field="io.hydration_backend",
            works="auto, python, buffered or direct",
        )
    provider, reason = provider_of(artifact, mode)
    return PlacedWeights(
        resolved=resolved,
        native=True,
        reason=reason,
        provider=provider,
        repository=_repository(policy, artifact) if mode == "auto" and provider == "either" else "",
    )


def _started(policy: Policy, artifact: Artifact) -> PlacedWeights:
    """Settle where an engine that is started anew gets its weights: from packs, where the artifact has all they need.

    Raises:
        UnsupportedError: They are wanted from somewhere else.
    """
    mode = policy.resolved()["weights.mode"]
    if artifact.descriptor.weights.starts and mode != "image":
        provider, reason = provider_of(artifact, mode)
        _refuse_samples(policy, provider)
        return PlacedWeights(
            resolved=policy.resolved(engine_defaults=engine_defaults(native=True, policy=policy)),
            native=True,
            ordered=True,
            reason=f"an engine that is started anew loads what the captured one had loaded: {reason}",
            provider=provider,
            repository=_repository(policy, artifact) if mode == "auto" and provider == "either" else "",
        )
    if artifact.descriptor.weights.starts or mode not in ("auto", "cache-only-auto"):
        raise UnsupportedError(
            f"the engine of {artifact.path} is started anew, and loads its "
            + ("packs" if artifact.descriptor.weights.starts else "checkpoint"),
            field="weights.mode",
            works='weights.mode = "auto"',
        )
    resolved = policy.resolved(engine_defaults=engine_defaults(native=False, policy=policy))
    return PlacedWeights(resolved=resolved, native=False, reason="an engine that is started anew loads its checkpoint")


def _refuse_samples(policy: Policy, provider: str) -> None:
    path = "weights.recovery.verify_model_bytes"
    if provider != "native" and path in policy.explicit and policy.resolved()[path]:
        raise UnsupportedError(
            "a template has no samples of a memory that a start could be compared with",
            field=path,
            works="0: the checksum of everything that is copied is compared",
        )


def provider_of(artifact: Artifact, mode: str) -> tuple[Literal["native", "either", "recovery"], str]:
    """Return who brings weights that are outside the image, and why.

    Args:
        artifact: With its weights outside the image.
        mode: ``weights.mode``.

    Raises:
        UnsupportedError: The artifact does not know that way.
    """
    weights = artifact.descriptor.weights
    packs, recovery = weights.payloads is not None, weights.recovery is not None
    has = " and ".join(one for one, there in (("in packs", packs), ("in a pinned checkpoint", recovery)) if there)
    works = tuple(one for one, there in (("auto", True), ("native", packs), ("recovery", recovery)) if there)
    _require(mode in (*works, "cache-only-auto"), artifact, has, works)
    if mode == "recovery" or not packs:
        return "recovery", "the policy says so" if mode == "recovery" else "the artifact names no packs"
    if mode == "native" or not recovery:
        return "native", f"the artifact has them {has}"
    return "either", f"the artifact has them {has}; the checkpoint is read where a pack is absent"


def _require(fits: bool, artifact: Artifact, has: str, works: tuple[str, ...]) -> None:
    if not fits:
        listed = " or ".join(f'"{one}"' for one in works)
        raise UnsupportedError(
            f"the weights of {artifact.path} are {has}", field="weights.mode", works=f"weights.mode = {listed}"
        )


def _repository(policy: Policy, artifact: Artifact) -> str:
    """Return where packs can be fetched from, with its revision; empty when nowhere."""
    return configured_repository(policy) or published_in(artifact)


def configured_repository(policy: Policy) -> str:
    """Return the repository that the policy names, with its revision; empty when it names none."""
    chosen = policy.weights.native
    return "" if chosen.repository is None else f"{chosen.repository} at {chosen.revision}"


def fetched_from(policy: Policy, artifact: Artifact) -> Source | None:
    """Return where packs are fetched from ahead of a restore; None: nobody fetches.

    Raises:
        UnsupportedError: The policy says where packs are in the repository, and not for every worker.
    """
    payloads, chosen = artifact.descriptor.weights.payloads, policy.weights.native
    if payloads is None or policy.resolved()["weights.mode"] not in ("auto", "native"):
        return None
    if missing := sorted({one.worker for one in payloads.objects} - {*chosen.files_by_worker}) * bool(
        chosen.files_by_worker
    ):
        raise UnsupportedError(
            f"no file in the repository is named for {', '.join(missing)} of {artifact.path}",
            field="weights.native.files_by_worker",
            works="a file for every worker, or leaving it out where packs have the paths that the artifact records",
        )
    repository, revision = chosen.repository, chosen.revision
    if repository is None:
        repository, revision = payloads.repository, payloads.revision
    if repository is None or revision is None:
        return None
    return Source(repository=repository, revision=revision, files=tuple(sorted(chosen.files_by_worker.items())))


def published_in(artifact: Artifact) -> str:
    """Return the repository that an artifact names, with its revision; empty when it names none."""
    payloads = artifact.descriptor.weights.payloads
    if payloads is None or payloads.repository is None:
        return ""
    return f"{payloads.repository} at {payloads.revision}"


def foresee(placed: PlacedWeights, artifact: Artifact, store: str, facts: Facts) -> PlacedWeights:
    """Say what either comes to, where the facts know the store.

    Raises:
        PayloadMissingError: A pack is absent, and is to be fetched first.
    """
    if placed.provider != "either" or facts.store is None or facts.store.root != store:
        return placed
    missing = sorted(artifact.packs - {pack.digest for pack in facts.store.packs})
    if not missing:
        return evolve(placed, expected="native")
    if placed.repository:
        raise fetch_required(missing[0], store, placed.repository)
    reason = f"the pack {missing[0]} was not in the store {store} when it was probed: the checkpoint is read"
    return evolve(placed, expected="recovery", reason=reason)


def provider_choices(placed: PlacedWeights) -> tuple[Choice, ...]:
    """Return what is settled about who brings the weights while the plan runs."""
    if placed.provider != "either":
        return ()
    return (Choice(name="provider", step="admit-packs", options=("native", "recovery"), rule=EITHER_RULE),)


def fetch_required(digest: str, store: str, repository: str) -> PayloadMissingError:
    """Return the error of a pack that is to be fetched before anything is restored."""
    return PayloadMissingError(
        f"fetch required: the pack {digest} is not in the store {store} and is published in {repository}; bring it "
        'there (Prepare), or recover from the checkpoint with weights.mode = "cache-only-auto" or "recovery"',
        digest=digest,
    )
