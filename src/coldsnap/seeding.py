"""Derived caches on their way: out of a quiet engine's directories into the artifact, and back before the thaw.

The one rule: a cache is derived. What is put back stays when a restore fails; nothing of it is anybody's data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from coldsnap.artifact.cache_seed import collect_seed, reconcile_seed
from coldsnap.engines.caches import ENABLED
from coldsnap.errors import AdmissionError
from coldsnap.receipts import Receipt
from coldsnap.sealing import UNIT
from coldsnap.session import Session
from coldsnap.steps import CollectCaches, LaunchEngine, PlantCaches

__all__ = ["collect", "make_room", "plant", "startup_told"]

STARTUP = ("state", "recorded_free_bytes", "free_bytes", "shortfall_bytes", "kv_cache_bytes")


def make_room(paths: list[str]) -> None:
    """Make the directories that an engine is launched with, private.

    Raises:
        AdmissionError: One cannot be made.
    """
    for path in paths:
        try:
            Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise AdmissionError(
                f"the cache directory {path} cannot be made ({error.strerror}); launch as a user who may write "
                "there, or with process.cache_seed = false"
            ) from error


def collect(session: Session, step: CollectCaches) -> Receipt:
    """Copy what the engine has in its caches by now."""
    writer = session.need(session.writer, "an output")
    found = {name: Path(os.path.expanduser(path)) for name, path in step.caches}
    held = {name: path for name, path in found.items() if any(file.is_file() for file in path.rglob("*"))}
    session.seeds = tuple(
        collect_seed(writer, path, unit=UNIT, name=name, target=str(path)) for name, path in sorted(held.items())
    )
    files = [file for seed in session.seeds for file in seed.files]
    empty = ", ".join(str(path) for name, path in sorted(found.items()) if name not in held)
    return Receipt(
        step=step.id,
        effective=f"{len(files)} files of {len(session.seeds)} caches",
        reason=f"nothing in {empty}" if empty else "",
        bytes=sum(file.bytes for file in files),
        details={seed.name: seed.target for seed in session.seeds},
    )


def plant(session: Session, step: PlantCaches) -> Receipt:
    """Put caches back to where the processes have them."""
    opened = session.need(session.artifact, "an artifact")
    planted = [reconcile_seed(opened, seed) for seed in opened.descriptor.cache_seeds]
    return Receipt(
        step=step.id,
        effective=f"{sum(one.files for one in planted)} files put back, {sum(one.kept for one in planted)} were there",
        reason=", ".join(step.targets),
        bytes=sum(one.bytes for one in planted),
    )


def startup_told(session: Session) -> Mapping[str, float | int | str]:
    """Tell what became of a startup plan, where the launch lets the engine take one."""
    environments = [dict(step.environment) for step in session.plan if isinstance(step, LaunchEngine)]
    if not any(ENABLED in environment for environment in environments):
        return {}
    told = session.ranks.startup()
    return {f"{rank} plan {name}": reply[name] for rank, reply in sorted(told.items()) for name in STARTUP}
