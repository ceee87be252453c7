"""Leaves and sections: the few lines that turn an attrs class into a checked part of the policy.

The one rule: a section names everything that is wrong with it at once, and remembers which of its leaves were set, so
that "left at the default" and "set to the default" stay different when layers are combined.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

import attrs
from attrs import frozen

from coldsnap.errors import PolicyError
from coldsnap.policy.limits import Limit, found

__all__ = ["Leaf", "Section", "build", "flat", "leaf", "leaves_of", "part", "section"]

T = TypeVar("T")
S = TypeVar("S", bound="Section")

_LEAF = "coldsnap.leaf"
_PART = "coldsnap.part"


@frozen(kw_only=True)
class Leaf:
    """One row of the table of leaves.

    Attributes:
        path: Dotted path, as in TOML: ``io.queue_depth``.
        name: Its last part, the attribute of the section.
        default: The library's default; ``None`` means unset.
        limit: What a legal value is.
        unit: The unit of a number, else empty.
        doc: What it decides, in one or two sentences.
    """

    path: str
    name: str
    default: Any
    limit: Limit
    unit: str
    doc: str

    @property
    def type(self) -> str:
        """The type in the words of TOML: text, boolean, integer, list of text, table of text."""
        return self.limit.type_name

    @property
    def allowed(self) -> str:
        """The legal values or the range, as a phrase."""
        return self.limit.allowed

    @property
    def legal(self) -> tuple[Any, ...]:
        """Every legal value of an enumeration or boolean; else the ends of the range, the default and a sample."""
        return self.limit.samples(self.default)

    def problem(self, value: object) -> str | None:
        """Return what is wrong with a frozen value, or ``None``."""
        return self.limit.problem(value)


def leaf(default: T, limit: Limit, *, doc: str, unit: str = "") -> T:
    """Declare a leaf in the body of a section.

    Returns:
        An attrs field; typed as the value, which is how type checkers understand a default.
    """
    declared: Any = attrs.field(default=default, metadata={_LEAF: (limit, unit, doc)})
    return cast("T", declared)


def part(kind: type[S]) -> S:
    """Declare a nested section in the body of a section."""
    declared: Any = attrs.field(factory=kind, metadata={_PART: kind})
    return cast("S", declared)


@frozen(kw_only=True, repr=False)
class Section:
    """A group of leaves and nested sections.

    Equality and hash look at the values alone; ``explicit`` tells which leaves were set.
    """

    # An attrs field, so that pickle, copy and attrs.evolve carry it along; not part of equality.
    _explicit: frozenset[str] | None = attrs.field(default=None, eq=False, alias="_explicit")

    LEAVES: ClassVar[tuple[Leaf, ...]] = ()
    PARTS: ClassVar[Mapping[str, type[Section]]] = {}

    @property
    def explicit(self) -> frozenset[str]:
        """Paths of the leaves that were set, whatever the value."""
        own = (leaf.path for leaf in self.LEAVES if leaf.name in (self._explicit or ()))
        nested = (path for name in self.PARTS for path in getattr(self, name).explicit)
        return frozenset((*own, *nested))

    def __repr__(self) -> str:
        """Show what was set, as the call that makes an equal section."""
        shown = {leaf.name: getattr(self, leaf.name) for leaf in self.LEAVES if leaf.path in self.explicit}
        shown |= {name: getattr(self, name) for name in self.PARTS if getattr(self, name).explicit}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def _rows(cls: type[Section], prefix: str) -> Iterator[Leaf]:
    for attribute in attrs.fields(cls):
        if _LEAF in attribute.metadata:
            limit, unit, doc = attribute.metadata[_LEAF]
            yield Leaf(
                path=prefix + attribute.name,
                name=attribute.name,
                default=attribute.default,
                limit=limit,
                unit=unit,
                doc=doc,
            )


def _given(cls: type[Section], path: str, given: dict[str, Any]) -> dict[str, Any]:
    """Freeze the arguments of a section's constructor, or name everything that is wrong with them."""
    problems: list[tuple[str, str]] = []
    given = dict(given)
    for row in cls.LEAVES:
        if row.name in given:
            given[row.name] = value = row.limit.freeze(given[row.name])
            if (problem := row.problem(value)) and not (value is None and row.default is None):
                problems.append((f"$.{row.path}", problem))
    for name, kind in cls.PARTS.items():
        if name in given and not isinstance(given[name], kind):
            problems.append((f"$.{path}{name}", f"expected {kind.__name__}(…); {found(given[name])}"))
    if problems:
        raise PolicyError(problems)
    return given


def _names_set(cls: type[Section], given: Mapping[str, Any]) -> frozenset[str]:
    """Tell which leaves these arguments set; ``None`` is the absence of a value."""
    values = {row.name: given[row.name] for row in cls.LEAVES if given.get(row.name) is not None}
    carried: frozenset[str] | None = given.get("_explicit")
    if carried is None:
        return frozenset(values)
    # attrs.evolve passes every field together with what was explicit before.
    changed = (row.name for row in cls.LEAVES if row.name in values and values[row.name] != row.default)
    return (carried & values.keys()) | frozenset(changed)


def section(path: str) -> Callable[[type[S]], type[S]]:
    """Make an attrs class a section of the policy at a path; goes above ``@frozen``.

    Args:
        path: Dotted path of the section, empty for the policy itself.
    """
    prefix = f"{path}." if path else ""

    def decorate(cls: type[S]) -> type[S]:
        cls.LEAVES = tuple(_rows(cls, prefix))
        cls.PARTS = {row.name: row.metadata[_PART] for row in attrs.fields(cls) if _PART in row.metadata}
        attributes = "".join(f"\n        {row.name}: {row.doc}" for row in cls.LEAVES)
        cls.__doc__ = f"{cls.__doc__}\n\n    Attributes:{attributes}\n"
        plain = cast("Callable[..., None]", cls.__init__)

        @wraps(plain)
        def init(self: S, *args: Any, **given: Any) -> None:
            given = _given(cls, prefix, given)
            plain(self, *args, **{**given, "_explicit": _names_set(cls, given)})

        cls.__init__ = cast("Any", init)  # type: ignore[method-assign]
        return cls

    return decorate


def leaves_of(cls: type[Section]) -> Iterator[Leaf]:
    """Iterate over the leaves of a section and of the sections in it, in the order of their declaration."""
    yield from cls.LEAVES
    for kind in cls.PARTS.values():
        yield from leaves_of(kind)


def flat(section: Section) -> dict[str, Any]:
    """Return every leaf of a section as ``{path: value}``."""
    values = {row.path: getattr(section, row.name) for row in section.LEAVES}
    for name in section.PARTS:
        values |= flat(getattr(section, name))
    return values


def build(cls: type[S], values: Mapping[str, Any], explicit: Collection[str]) -> S:
    """Make a section from ``{path: value}``.

    Args:
        cls: The section's class.
        values: Every leaf of it; other paths are ignored.
        explicit: Paths to remember as set; a value that differs from its default always is.
    """
    given: dict[str, Any] = {row.name: values[row.path] for row in cls.LEAVES}
    given |= {name: build(kind, values, explicit) for name, kind in cls.PARTS.items()}
    return cls(**given, _explicit=frozenset(row.name for row in cls.LEAVES if row.path in explicit))
