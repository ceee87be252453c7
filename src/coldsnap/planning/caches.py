"""What is settled about derived caches: where an engine keeps them, which an artifact carries, which go back.

The one rule: a cache is carried because a plan names its directory, never because it happened to be there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from coldsnap.artifact import Artifact
from coldsnap.engines.base import Engine
from coldsnap.engines.caches import bound, managed
from coldsnap.engines.specs import COMMAND, spec_to_text
from coldsnap.errors import UnsupportedError
from coldsnap.policy import ResolvedPolicy
from coldsnap.steps import CollectCaches, PlantCaches

__all__ = ["cache_environment", "collect_steps", "launched_caches", "plant_steps", "require_bound"]

SEED, PATHS = "process.cache_seed", "process.cache_paths"


def cache_environment(resolved: ResolvedPolicy, engine: Engine) -> Mapping[str, str]:
    """Return what an engine is launched with so that its caches lie where an artifact can carry them from."""
    return bound(spec_to_text(engine)) if resolved[SEED] and not resolved[PATHS] else {}


def require_bound(wanted: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Refuse an engine whose own environment binds a cache elsewhere.

    Raises:
        UnsupportedError: Named by the variable.
    """
    elsewhere = sorted(name for name, path in wanted.items() if environment.get(name) != path)
    if elsewhere:
        raise UnsupportedError(
            f"the engine keeps its caches where env says ({', '.join(elsewhere)}), and not below the managed root",
            field=SEED,
            works=f"an engine without {elsewhere[0]} in env, or {PATHS} that names its directory",
        )


def launched_caches(resolved: ResolvedPolicy, labels: Mapping[str, str], *, run_dir: object) -> Mapping[str, str]:
    """Return the managed caches of an engine that runs already.

    Raises:
        UnsupportedError: They are wanted, and it was launched without.
    """
    if not resolved[SEED] or resolved[PATHS]:
        return {}
    found = managed(json.loads(labels.get(COMMAND, "{}")).get("environment", {}))
    if not found:
        raise UnsupportedError(
            f"the engine in {run_dir} was launched with its caches elsewhere than below the managed root",
            field=SEED,
            works=f"false, {PATHS} that names their directories, or launching it with {SEED} = true",
        )
    return found


def collect_steps(
    resolved: ResolvedPolicy, caches: Mapping[str, str], *, output: str, after: str
) -> tuple[CollectCaches, ...]:
    """Return the step that copies caches into the artifact, while the engine is quiet and nothing writes them."""
    if not resolved[SEED]:
        return ()
    named = {f"path-{number}": path for number, path in enumerate(resolved[PATHS])} or caches
    return (CollectCaches(id="caches", after=(after,), output=output, caches=tuple(sorted(named.items()))),)


def plant_steps(artifact: Artifact, *, after: str) -> tuple[PlantCaches, ...]:
    """Return the step that puts caches back before a process that maps a file of one is."""
    targets = tuple(seed.target for seed in artifact.descriptor.cache_seeds)
    return (PlantCaches(id="caches", after=(after,), targets=targets),) if targets else ()
