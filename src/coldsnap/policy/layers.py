"""Layers: library default ← driver default ← engine default ← profile ← user.

The one rule: every final value remembers the layer that set it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen

from coldsnap.errors import PolicyError
from coldsnap.policy.leaf import build, flat, leaves_of
from coldsnap.policy.limits import did_you_mean
from coldsnap.policy.profiles import PROFILES, ProfileName
from coldsnap.policy.rules import Problem, broken_rules

if TYPE_CHECKING:
    from coldsnap.policy import Policy

__all__ = ["Layer", "ResolvedPolicy", "layered"]

Layer = Literal["library", "driver", "engine", "profile", "user"]


@frozen(kw_only=True)
class ResolvedPolicy:
    """The final values and who set each of them.

    Attributes:
        policy: The final values; every leaf that some layer set counts as set.
        provenance: ``{path: layer}`` for every leaf.
    """

    policy: Policy
    provenance: Mapping[str, Layer] = field(hash=False)

    def __getitem__(self, path: str) -> Any:
        """Return the final value of a leaf by its dotted path."""
        return flat(self.policy)[path]

    def explain(self, path: str | None = None) -> str:
        """Describe one leaf, or all of them as a table: value, layer, what is allowed, what it means."""
        from coldsnap.policy.explain import describe, table  # noqa: PLC0415  only people need it

        return table(self) if path is None else describe(self, path)


def _checked(name: Layer, values: Mapping[str, Any], policy: type[Policy]) -> dict[str, Any]:
    """Freeze the values of a layer; a wrong one is a mistake of a driver or engine, named as such."""
    rows = {row.path: row for row in leaves_of(policy)}
    checked: dict[str, Any] = {}
    wrong: list[Problem] = []
    for path, value in values.items():
        if path not in rows:
            wrong.append((f"$.{path}", f"is no leaf of the policy{did_you_mean(path, rows)}"))
            continue
        checked[path] = rows[path].limit.freeze(value)
        if problem := rows[path].problem(checked[path]):
            wrong.append((f"$.{path}", problem))
    if wrong:
        raise PolicyError(wrong, what=f"set of {name} defaults")
    return checked


def layered(
    user: Policy,
    *,
    driver_defaults: Mapping[str, Any],
    engine_defaults: Mapping[str, Any],
    profile: ProfileName,
) -> ResolvedPolicy:
    """Lay the user's policy over the profile, the engine's defaults, the driver's and the library's.

    Args:
        user: Only its explicitly set leaves count.
        driver_defaults: ``{path: value}``.
        engine_defaults: ``{path: value}``.
        profile: Name of a profile.

    Returns:
        The final policy with its provenance.

    Raises:
        PolicyError: A default is no legal value, or the layers together break a rule; each message names the layers.
    """
    kind = type(user)
    values = {row.path: row.default for row in leaves_of(kind)}
    provenance: dict[str, Layer] = dict.fromkeys(values, "library")
    chosen = flat(user)
    layers: tuple[tuple[Layer, Mapping[str, Any]], ...] = (
        ("driver", driver_defaults),
        ("engine", engine_defaults),
        ("profile", PROFILES[profile]),
        ("user", {path: chosen[path] for path in user.explicit}),
    )
    for name, layer in layers:
        checked = _checked(name, layer, kind)
        values |= checked
        provenance |= dict.fromkeys(checked, name)
    if broken := broken_rules(values):
        raise PolicyError([(path, f"{text} (set by the {provenance[path[2:]]} layer)") for path, text in broken])
    explicit = [path for path, name in provenance.items() if name != "library"]
    return ResolvedPolicy(policy=build(kind, values, explicit), provenance=provenance)
