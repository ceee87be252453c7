"""Hypothesis strategies of the project's values, to be reused by every test.

- :func:`policies`: valid policies, any subset of leaves set, defaults among the values.
- :func:`leaf_values`: legal values of one leaf.
- :data:`wrong_values`: values of every type, most of them illegal for a given leaf.
"""

from typing import Any

from hypothesis import strategies as st

from coldsnap.policy import Leaf, Policy, leaves
from coldsnap.policy.limits import OneOf, Pattern, Span, Subset
from coldsnap.policy.process import CACHE_ROOTS, CachePaths
from coldsnap.policy.weights import WorkerFiles

# A path segment as people write them, and as they do not: quotes and non-ASCII letters must survive both formats.
SEGMENTS = st.from_regex(r"[a-zA-Z0-9_\-äß語🧊\"' #=]{1,12}", fullmatch=True).filter(lambda text: text.isprintable())
WORKERS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True)


def _paths(value: list[tuple[str, str]]) -> tuple[str, ...]:
    return tuple({root: f"{root}/{segment}" for root, segment in value}.values())


def leaf_values(row: Leaf) -> st.SearchStrategy[Any]:
    """Return legal values of a leaf, its default among them."""
    limit = row.limit
    if isinstance(limit, OneOf):
        return st.sampled_from(limit.values)
    if isinstance(limit, Span):
        high = limit.maximum if limit.maximum is not None else 2**40
        return st.integers(-(-limit.minimum // limit.multiple), high // limit.multiple).map(
            lambda number: number * limit.multiple
        )
    if isinstance(limit, Pattern):
        if row.path == "io.native_library":
            return st.lists(SEGMENTS, min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts))
        return st.from_regex(limit.pattern, fullmatch=True)
    if isinstance(limit, Subset):
        return st.lists(st.sampled_from(limit.values), unique=True).map(tuple)
    if isinstance(limit, CachePaths):
        return st.lists(st.tuples(st.sampled_from(CACHE_ROOTS), SEGMENTS), max_size=4).map(_paths)
    if isinstance(limit, WorkerFiles):
        files = st.lists(SEGMENTS, min_size=1, max_size=3).map("/".join)
        return st.dictionaries(WORKERS, files, max_size=4).map(limit.freeze)
    return st.booleans()


def _repaired(changes: dict[str, Any]) -> dict[str, Any]:
    """Add or drop the least that the rules between leaves ask for."""
    if changes.get("weights.mode", "auto") in ("auto", "recovery", "cache-only-auto"):
        changes.pop("weights.recovery.enabled", None)
    if any(path in changes for path in ("weights.native.repository", "weights.native.revision")) or changes.get(
        "weights.native.files_by_worker"
    ):
        changes.setdefault("weights.native.repository", "owner/name")
        changes.setdefault("weights.native.revision", "0" * 40)
    if changes.get("process.shape_calibration") == "enabled":
        changes["graphs.asynchronous"] = True
    if changes.get("process.cache_paths"):
        changes.pop("process.cache_seed", None)
    if changes.get("io.hydration_backend") == "gds":
        changes["io.verify_mode"] = "preverified"
    return changes


def policies() -> st.SearchStrategy[Policy]:
    """Return valid policies."""
    optional = {row.path: leaf_values(row) for row in leaves()}
    return st.fixed_dictionaries({}, optional=optional).map(lambda changes: Policy().evolve(**_repaired(changes)))


wrong_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.lists(st.one_of(st.integers(), st.text(max_size=5)), max_size=3),
    st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=5)), max_size=3),
)
