"""What a legal value of a leaf is: enumerations, booleans, ranges of integers, texts with a pattern, subsets.

The one rule: a limit never converts. ``"4096"`` is not 4096 and ``"no"`` is not false; a value is legal as it stands or
it is described, with what was expected and what was found.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from attrs import frozen

__all__ = [
    "GIB",
    "MIB",
    "PAGE_BYTES",
    "Flag",
    "FrozenMap",
    "Limit",
    "OneOf",
    "Pattern",
    "Span",
    "Subset",
    "clipped",
    "did_you_mean",
    "found",
    "literal",
]

MIB = 1024 * 1024
GIB = 1024 * MIB
PAGE_BYTES = 4096  # direct I/O wants offsets and lengths aligned to it on every filesystem we qualify

_SHOWN_CHARACTERS = 60  # of a wrong value; a policy file may hold a megabyte of it


class FrozenMap(Mapping[str, str]):
    """A mapping that can be hashed and pickled, which ``MappingProxyType`` cannot."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, str]) -> None:
        self._items = dict(sorted(items.items()))

    def __getitem__(self, key: str) -> str:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def literal(value: object) -> str:
    """Write a value the way TOML and JSON both write it; a map as a TOML inline table."""
    import json  # noqa: PLC0415  only explanations and errors need it

    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(key)} = {literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(literal, value)) + "]"
    if value is None or type(value) in (bool, int, str):
        return "unset" if value is None else json.dumps(value, ensure_ascii=False)
    return repr(value)


def found(value: object) -> str:
    """Name a wrong value with its kind, as an error shows it."""
    kinds = {bool: "boolean ", int: "integer ", float: "float ", str: "text ", tuple: "list ", list: "list "}
    if value is None:
        return "found null; to leave a key at its default, leave it out"
    return f"found {'table ' if isinstance(value, Mapping) else kinds.get(type(value), '')}{clipped(literal(value))}"


def clipped(text: str) -> str:
    """Shorten a text for an error, and spell out the lone surrogates of JSON, which no terminal takes."""
    short = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
    return short.encode("utf-8", "backslashreplace").decode()


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Return ``; did you mean "…"?`` when one of the known words is close, else nothing."""
    import difflib  # noqa: PLC0415  slow to import, and only errors need it

    close = difflib.get_close_matches(word[:100].replace("-", "_"), [name.replace("-", "_") for name in known], n=1)
    names = [name for name in known if name.replace("-", "_") in close]
    return f'; did you mean "{names[0]}"?' if names else ""


@frozen
class Limit:
    """The interface of every limit, with what suits most of them."""

    type_name = "text"

    @property
    def allowed(self) -> str:
        """The legal values, as a phrase."""
        raise NotImplementedError

    def freeze(self, value: Any) -> Any:
        """Return the immutable form of a value as a user or a parser gives it."""
        return value

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with a frozen value, or ``None``."""
        raise NotImplementedError

    def samples(self, default: Any) -> tuple[Any, ...]:
        """Return every legal value, or for open types the ends, the default and a sample."""
        raise NotImplementedError


@frozen
class OneOf(Limit):
    """One of a few words."""

    values: tuple[str, ...]

    @property
    def allowed(self) -> str:
        """The words."""
        return " | ".join(self.values)

    def problem(self, value: Any) -> str | None:
        """Refuse all but the words."""
        if type(value) is str and value in self.values:
            return None
        hint = did_you_mean(value, self.values) if type(value) is str else ""
        return f"expected one of {', '.join(self.values)}; {found(value)}{hint}"

    def samples(self, default: Any) -> tuple[Any, ...]:  # noqa: ARG002
        """Return every word."""
        return self.values


@frozen
class Flag(Limit):
    """A boolean; never an integer, never a word."""

    type_name = "boolean"

    @property
    def allowed(self) -> str:
        """The two values."""
        return "true | false"

    def problem(self, value: Any) -> str | None:
        """Refuse all but the two values."""
        return None if type(value) is bool else f"expected true or false; {found(value)}"

    def samples(self, default: Any) -> tuple[Any, ...]:  # noqa: ARG002
        """Return both."""
        return (True, False)


@frozen
class Span(Limit):
    """A range of integers, possibly open above, possibly of multiples only."""

    minimum: int
    maximum: int | None = None
    multiple: int = 1

    type_name = "integer"

    @property
    def allowed(self) -> str:
        """The range in words."""
        ends = f"{self.minimum} to {self.maximum}" if self.maximum is not None else f"at least {self.minimum}"
        return ends if self.multiple == 1 else f"multiple of {self.multiple}, {ends}"

    def problem(self, value: Any) -> str | None:
        """Refuse other types (``True`` is an int to Python, not to us) and numbers outside."""
        # Readers of TOML and JSON elsewhere stop at 64 bits, and so does an open range.
        highest = self.maximum if self.maximum is not None else 2**63 - 1
        if type(value) is int and self.minimum <= value <= highest and value % self.multiple == 0:
            return None
        return f"expected an integer ({self.allowed}); {found(value)}"

    def samples(self, default: Any) -> tuple[Any, ...]:
        """Return the lower end, the default and the upper end, without repetition."""
        high = self.maximum if self.maximum is not None else max(16 * self.multiple, 2 * default)
        return tuple(dict.fromkeys((self.minimum, default, high)))


@frozen
class Pattern(Limit):
    """A text that matches a pattern as a whole.

    Attributes:
        pattern: A regular expression.
        what: What it means, for people, after the word "expected".
        sample: A legal text.
    """

    pattern: str
    what: str
    sample: str

    @property
    def allowed(self) -> str:
        """The pattern in words."""
        return self.what

    def problem(self, value: Any) -> str | None:
        """Refuse what does not match from its first to its last character."""
        if type(value) is str and re.fullmatch(self.pattern, value):
            return None
        return f"expected {self.what}; {found(value)}"

    def samples(self, default: Any) -> tuple[Any, ...]:
        """Return the sample, and the default when there is one."""
        return tuple(dict.fromkeys(value for value in (default, self.sample) if value is not None))


@frozen
class Subset(Limit):
    """A list of some of a few words, without repetition."""

    values: tuple[str, ...]

    type_name = "list of text"

    @property
    def allowed(self) -> str:
        """The words, in brackets."""
        return f"any of {literal(self.values)}, or []"

    def freeze(self, value: Any) -> Any:
        """Take a list for a tuple."""
        return tuple(value) if type(value) is list else value

    def problem(self, value: Any) -> str | None:
        """Refuse other types, other words and repetitions."""
        if type(value) is not tuple:
            return f"expected a list ({self.allowed}); {found(value)}"
        wrong = [word for word in value if not (type(word) is str and word in self.values)]
        if wrong or len(set(value)) != len(value):
            return f"expected a list ({self.allowed}); {found(value)}"
        return None

    def samples(self, default: Any) -> tuple[Any, ...]:
        """Return nothing, everything and the default."""
        return tuple(dict.fromkeys(((), self.values, default)))
