"""Policies as text: strict TOML and JSON.

The one rule: reading never guesses. An unknown or repeated key, a value of another type and text after the end are
problems with their path, and all of them are named at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from coldsnap.errors import FileReadError, PolicyError
from coldsnap.policy.leaf import Leaf, Section, flat, leaves_of
from coldsnap.policy.limits import clipped, did_you_mean, found, literal
from coldsnap.policy.rules import Problem, broken_rules

__all__ = ["LIMIT_BYTES", "data_of", "parse_json", "parse_toml", "read_file", "values_in", "write_json", "write_toml"]

LIMIT_BYTES = 1024 * 1024  # a policy is a page; more is another file
_HINTS = 50  # looking for close words is slow, and a megabyte of unknown keys is no typing mistake


# Reading.


def read_file(path: str) -> bytes:
    """Read a policy file, one byte more than allowed at most.

    Raises:
        FileReadError: It cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read(LIMIT_BYTES + 1)
    except OSError as error:
        raise FileReadError.of(error, path, "policy") from error


def _decoded(text: str | bytes, what: str) -> str:
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(raw) > LIMIT_BYTES:
        raise PolicyError([("$", f"expected at most {LIMIT_BYTES} bytes; found more")], what=what)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"expected UTF-8; found byte 0x{raw[error.start]:02x} at offset {error.start}"
        raise PolicyError([("$", message)], what=what) from None


def _parsed(parse: Callable[[str], Any], text: str, kind: str, what: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:  # also an integer of too many digits
        raise PolicyError([("$", f"expected {kind}; {error}")], what=what) from None
    except RecursionError:
        raise PolicyError([("$", f"expected {kind} of a few levels; found nesting without end")], what=what) from None


def parse_toml(text: str | bytes, what: str = "policy") -> tuple[Any, list[Problem]]:
    """Parse TOML into plain data; its parser itself refuses repeated keys."""
    import tomllib  # noqa: PLC0415  a policy built in Python needs no parser

    return _parsed(tomllib.loads, _decoded(text, what), "TOML", what), []


class _Pairs(list[tuple[str, Any]]):
    """An object as its pairs: a dict would already have dropped the first of two equal keys."""


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def parse_json(text: str | bytes, what: str = "policy") -> tuple[Any, list[Problem]]:
    """Parse JSON into plain data and the keys that appear twice; NaN and trailing text are refused at once."""

    def load(text: str) -> Any:
        return json.loads(text, object_pairs_hook=_Pairs, parse_constant=_no_constant)

    repeated: list[Problem] = []
    data = _unique(_parsed(load, _decoded(text, what), "JSON", what), "$", repeated)
    return data, repeated


def _unique(data: Any, path: str, repeated: list[Problem]) -> Any:
    if isinstance(data, _Pairs):
        table: dict[str, Any] = {}
        for key, value in data:
            place = f"{path}.{_shown_key(key)}"
            if key in table:
                repeated.append((place, "expected once; found again; keep one of them"))
            table[key] = _unique(value, place, repeated)
        return table
    if isinstance(data, list):
        return [_unique(item, f"{path}[{index}]", repeated) for index, item in enumerate(data)]
    return data


def values_in(parsed: tuple[Any, Sequence[Problem]], root: type[Section], what: str = "policy") -> dict[str, Any]:
    """Check plain nested data against the table of leaves and the rules between them.

    Args:
        parsed: What a parser returned: data, and the problems it found.
        root: The class of the policy.
        what: Name of the text in an error.

    Returns:
        ``{path: frozen value}`` of the keys in the data.

    Raises:
        PolicyError: With every problem, the parser's first.
    """
    data, earlier = parsed
    wrong = list(earlier)
    values = dict(_walk(data, root, "", wrong))
    illegal = {path.removeprefix("$.") for path, _ in wrong}
    complete = {row.path: row.default for row in leaves_of(root)}
    complete |= {path: value for path, value in values.items() if path not in illegal}
    wrong += broken_rules(complete, illegal)
    if wrong:
        raise PolicyError(wrong, what=what)
    return values


def _walk(data: Any, kind: type[Section], prefix: str, wrong: list[Problem]) -> Iterator[tuple[str, Any]]:
    if not isinstance(data, Mapping):
        wrong.append((f"$.{prefix}".rstrip("."), f"expected a table; {found(data)}"))
        return
    rows = {row.name: row for row in kind.LEAVES}
    for key, value in data.items():
        if key in kind.PARTS:
            yield from _walk(value, kind.PARTS[key], f"{prefix}{key}.", wrong)
        elif key in rows:
            frozen = rows[key].limit.freeze(value)
            if problem := rows[key].problem(frozen):
                wrong.append((f"$.{prefix}{key}", problem))
            yield prefix + key, frozen
        else:
            hint = _unknown(str(key), kind, prefix) if len(wrong) < _HINTS else "is no key of a policy"
            wrong.append((f"$.{prefix}{_shown_key(key)}", hint))


def _shown_key(key: object) -> str:
    return key if isinstance(key, str) and re.fullmatch(r"[\w-]{1,60}", key, re.ASCII) else clipped(literal(key))


def _unknown(key: str, kind: type[Section], prefix: str) -> str:
    known = [*(row.name for row in kind.LEAVES), *kind.PARTS]
    hint = did_you_mean(key, known) or f"; its keys are {', '.join(known)}"
    return f"is no key of {prefix.rstrip('.') or 'a policy'}{hint}"


# Writing.


def _written(policy: Section, *, complete: bool) -> dict[str, Any]:
    """Return the leaves to write; a leaf without a value has no form in TOML and is left out of both."""
    explicit = policy.explicit
    return {path: value for path, value in flat(policy).items() if value is not None and (complete or path in explicit)}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def data_of(policy: Section, *, complete: bool = False) -> dict[str, Any]:
    """Return a policy as nested plain data, ready for a JSON encoder.

    Args:
        policy: The policy.
        complete: Write every leaf that has a value, instead of those that were set.
    """
    data: dict[str, Any] = {}
    for path, value in _written(policy, complete=complete).items():
        *tables, name = path.split(".")
        place = data
        for table in tables:
            place = place.setdefault(table, {})
        place[name] = _plain(value)
    return data


def write_json(policy: Section, *, complete: bool = False) -> str:
    """Return a policy as JSON, indented."""
    return json.dumps(data_of(policy, complete=complete), indent=2, ensure_ascii=False) + "\n"


def write_toml(policy: Section, *, complete: bool = False) -> str:
    """Return a policy as TOML, one table for each section; a complete one explains every leaf in a comment."""
    values = _written(policy, complete=complete)
    tables: dict[str, list[str]] = {}
    for row in leaves_of(type(policy)):
        if complete or row.path in values:
            lines = tables.setdefault(row.path.rpartition(".")[0], [])
            lines += _comment(row) if complete else []
            lines += [f"{row.name} = {literal(values[row.path])}"] if row.path in values else [f"# {row.name} is unset"]
    blocks = (("" if not name else f"[{name}]\n") + "\n".join(lines) + "\n" for name, lines in tables.items())
    return "\n".join(blocks)


def _comment(row: Leaf) -> list[str]:
    import textwrap  # noqa: PLC0415  only complete texts have comments

    text = f"{row.doc} Allowed: {row.allowed}."
    return textwrap.wrap(text, 110, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
