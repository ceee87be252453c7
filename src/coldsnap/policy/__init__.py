"""What the user wants: one frozen value, written in Python, TOML or JSON.

::

    policy = Policy(weights=Weights(mode="native"), io=IO(queue_depth=8))
    policy = Policy.load("policy.toml", profile="qualification")
    policy = policy.evolve(**{"weights.recovery.verify_bytes": 64})
    print(policy.explain())

A policy says what should happen, never how or where: it knows no machine, no model and no artifact. ``resolve`` turns
it into a plan, and refuses what this library or these machines cannot do.

The one rule: a policy that exists is valid, and one that is not names all of its problems at once.
"""

# leaf() and part() return attrs fields, which no two instances share.
# ruff: noqa: RUF009

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any, Self, get_args

from attrs import frozen

from coldsnap.errors import PolicyError
from coldsnap.policy.compatibility import Compatibility
from coldsnap.policy.graphs import Graphs
from coldsnap.policy.io import IO
from coldsnap.policy.layers import Layer, ResolvedPolicy, layered
from coldsnap.policy.leaf import Leaf, Section, build, flat, leaf, leaves_of, part, section
from coldsnap.policy.limits import OneOf, did_you_mean, found
from coldsnap.policy.process import Process
from coldsnap.policy.profiles import PROFILES, ProfileName
from coldsnap.policy.rules import Problem, broken_rules, problems
from coldsnap.policy.weights import NativeWeights, RecoveryWeights, Weights

__all__ = [
    "IO",
    "PROFILES",
    "Compatibility",
    "Graphs",
    "Layer",
    "Leaf",
    "NativeWeights",
    "Policy",
    "Process",
    "ProfileName",
    "RecoveryWeights",
    "ResolvedPolicy",
    "Weights",
    "leaves",
]


@section("")
@frozen(kw_only=True, repr=False)
class Policy(Section):
    """What the user wants of captures and restores.

    Two policies with the same values are equal, even when one sets a leaf to its default and the other leaves it
    alone; ``explicit`` tells them apart, and so does ``resolved``, where a default may come from a driver, an engine
    or a profile.
    """

    profile: ProfileName = leaf(
        "default",
        OneOf(get_args(ProfileName)),
        doc="Named set of values laid under the user's. qualification: samples of every tensor are compared.",
    )
    compatibility: Compatibility = part(Compatibility)
    weights: Weights = part(Weights)
    process: Process = part(Process)
    graphs: Graphs = part(Graphs)
    io: IO = part(IO)

    def __attrs_post_init__(self) -> None:
        if broken := broken_rules(flat(self)):
            raise PolicyError(broken)

    def evolve(self, **changes: Any) -> Self:
        """Return a policy with some leaves or whole sections changed.

        ``policy.evolve(**{"weights.mode": "native", "io.queue_depth": 8})``, ``policy.evolve(io=IO(queue_depth=8))``.

        Args:
            **changes: Values by dotted path of a leaf or section; ``None`` puts a leaf back to its default, unset.

        Raises:
            PolicyError: With every unknown path, illegal value and broken rule.
        """
        rows = {row.path: row for row in leaves_of(type(self))}
        values, explicit, unknown = flat(self), set(self.explicit), list[Problem]()
        for path, value in _leaf_by_leaf(type(self), changes, unknown).items():
            explicit.discard(path)
            values[path] = rows[path].default
            if value is not None:
                explicit.add(path)
                values[path] = rows[path].limit.freeze(value)
        if wrong := unknown + problems(rows.values(), values):
            raise PolicyError(wrong)
        return build(type(self), values, explicit)

    def resolved(
        self,
        *,
        driver_defaults: Mapping[str, Any] | None = None,
        engine_defaults: Mapping[str, Any] | None = None,
        profile: ProfileName | None = None,
    ) -> ResolvedPolicy:
        """Lay this policy over the profile and the defaults of a driver and an engine.

        Args:
            driver_defaults: ``{path: value}``, the lowest layer above the library's defaults.
            engine_defaults: ``{path: value}``.
            profile: Overrides this policy's own.

        Returns:
            The final policy, and which layer set each leaf.

        Raises:
            PolicyError: The layers together break a rule, or a default is not legal.
        """
        user = self if profile is None else self.evolve(profile=profile)
        return layered(
            user,
            driver_defaults=driver_defaults or {},
            engine_defaults=engine_defaults or {},
            profile=user.profile,
        )

    def explain(self, path: str | None = None) -> str:
        """Describe one leaf, or all of them as a table: value, who set it, what is allowed, what it means."""
        return self.resolved().explain(path)

    @classmethod
    def load(cls, path: str | PathLike[str], *, profile: ProfileName | None = None) -> Self:
        """Read a policy from a ``.toml`` or ``.json`` file.

        Args:
            path: The file, UTF-8, at most 1 MiB.
            profile: Overrides the profile that the file names.

        Raises:
            PolicyError: The text is no valid policy; every problem with its path.
            FileReadError: The file cannot be read; a FileNotFoundError when there is none.
        """
        from coldsnap.policy import text  # noqa: PLC0415  a policy built in Python needs no parser

        name = fspath(path)
        what = f"policy {name}"
        parse = text.parse_toml if _suffix(name) == ".toml" else text.parse_json
        policy = cls._of(text.values_in(parse(text.read_file(name), what), cls, what))
        return policy if profile is None else policy.evolve(profile=profile)

    def save(self, path: str | PathLike[str], *, complete: bool = False) -> None:
        """Write the policy to a ``.toml`` or ``.json`` file; what :meth:`load` returns from it is equal.

        Args:
            path: The file; an existing one is overwritten.
            complete: Write every leaf, in TOML with its meaning, instead of those that were set.
        """
        name = fspath(path)
        write = self.to_toml if _suffix(name) == ".toml" else self.to_json
        written = write(complete=complete)
        with open(name, "w", encoding="utf-8", newline="\n") as file:
            file.write(written)

    @classmethod
    def from_toml(cls, text: str | bytes) -> Self:
        """Parse TOML, or raise a PolicyError with every problem."""
        from coldsnap.policy.text import parse_toml, values_in  # noqa: PLC0415

        return cls._of(values_in(parse_toml(text), cls))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse JSON, or raise a PolicyError with every problem."""
        from coldsnap.policy.text import parse_json, values_in  # noqa: PLC0415

        return cls._of(values_in(parse_json(text), cls))

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Check nested plain data, as :meth:`to_data` returns it, or raise a PolicyError with every problem."""
        from coldsnap.policy.text import values_in  # noqa: PLC0415

        return cls._of(values_in((data, []), cls))

    def to_toml(self, *, complete: bool = False) -> str:
        """Write TOML: the leaves that were set, or every leaf with its meaning in a comment."""
        from coldsnap.policy.text import write_toml  # noqa: PLC0415

        return write_toml(self, complete=complete)

    def to_json(self, *, complete: bool = False) -> str:
        """Write JSON: the leaves that were set, or every leaf that has a value."""
        from coldsnap.policy.text import write_json  # noqa: PLC0415

        return write_json(self, complete=complete)

    def to_data(self, *, complete: bool = False) -> dict[str, Any]:
        """Return nested plain data for another document's encoder."""
        from coldsnap.policy.text import data_of  # noqa: PLC0415

        return data_of(self, complete=complete)

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> Self:
        return build(cls, {row.path: row.default for row in leaves_of(cls)} | dict(values), values.keys())


def leaves() -> tuple[Leaf, ...]:
    """Return the table of leaves: path, type, default, legal values or range, unit, meaning."""
    return tuple(leaves_of(Policy))


def _suffix(name: str) -> str:
    for suffix in (".toml", ".json"):
        if name.endswith(suffix):
            return suffix
    raise PolicyError([("$", f"expected a file name that ends in .toml or .json; {found(name)}")])


def _leaf_by_leaf(policy: type[Policy], changes: Mapping[str, Any], wrong: list[Problem]) -> dict[str, Any]:
    """Spread out changed sections over their leaves, and collect paths that do not exist."""
    parts = dict(_parts(policy, ""))
    known = [*(row.path for row in leaves_of(policy)), *parts]
    spread: dict[str, Any] = {}
    for path, value in changes.items():
        if path not in known:
            wrong.append((f"$.{path}", f"is no leaf of the policy{did_you_mean(path, known)}"))
        elif path not in parts:
            spread[path] = value
        elif isinstance(value, parts[path]):
            chosen = flat(value)
            spread |= {row: chosen[row] if row in value.explicit else None for row in chosen}
        else:
            wrong.append((f"$.{path}", f"expected {parts[path].__name__}(…); {found(value)}"))
    return spread


def _parts(kind: type[Section], prefix: str) -> list[tuple[str, type[Section]]]:
    nested = [(prefix + name, part) for name, part in kind.PARTS.items()]
    return nested + [row for path, part in nested for row in _parts(part, path + ".")]
