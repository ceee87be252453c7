"""Records as JSON text: attrs classes out, attrs classes in, strictly.

The one rule: nothing is coerced. A missing or unknown field, a number as text or a bool as a number is a FormatError
that names the place. The rules are numbered in ``docs/facts.md``.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import attrs

from coldsnap.errors import FormatError

__all__ = ["canonical", "digest", "from_plain", "load_record", "to_plain"]

T = TypeVar("T")
SCALARS = (str, int, float, bool)


def to_plain(value: object) -> Any:
    """Return a record as dicts, lists and scalars."""
    cls: type[Any] = type(value)
    if attrs.has(cls):
        return {field.name: to_plain(getattr(value, field.name)) for field in attrs.fields(cls)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def canonical(value: object) -> str:
    """Return the canonical JSON text of a record: sorted keys, no white space, ASCII only."""
    return json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(value: object) -> str:
    """Return ``sha256:<hex>`` over the canonical text of a record."""
    return f"sha256:{hashlib.sha256(canonical(value).encode()).hexdigest()}"


def load_record(cls: type[T], text: str, *, where: str, kind: str, version: int) -> T:
    """Read ``{"format": version, "kind": kind, …fields}``.

    Args:
        cls: The attrs class.
        text: JSON text.
        where: The file, for the error.
        kind: The record's ``kind``.
        version: The record's ``format``.

    Raises:
        FormatError: It is not such a record; rules ``facts.1`` to ``facts.4``.
    """
    try:
        plain = json.loads(text)
    except ValueError as error:
        raise FormatError(f"is not JSON: {error}", path=where, rule="facts.1") from error
    if not isinstance(plain, dict) or plain.get("kind") != kind or plain.get("format") != version:
        raise FormatError(f"is not a {kind} record of format {version}", path=where, rule="facts.2")
    return cast("T", from_plain(cls, {name: plain[name] for name in plain if name not in {"kind", "format"}}, where))


def from_plain(expected: Any, value: Any, where: str) -> Any:
    """Return ``value`` as the type ``expected``: scalar, optional, tuple, mapping with text keys, or attrs class.

    Raises:
        FormatError: It is of another type, or a field is missing or unknown; rules ``facts.3`` and ``facts.4``.
    """
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in {Union, types.UnionType}:
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return None if value is None else from_plain(inner, value, where)
    if expected in SCALARS:
        if type(value) is not expected:
            raise _wrong(expected.__name__, value, where)
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong("list", value, where)
        return tuple(from_plain(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if not isinstance(value, dict):
        raise _wrong("object", value, where)
    if attrs.has(expected):
        return _from_object(expected, value, where)
    return {key: from_plain(arguments[1], item, f"{where}.{key}") for key, item in value.items()}


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)  # it compiles every annotation, each time


def _from_object(cls: Any, value: dict[str, Any], where: str) -> Any:
    hints = _hints(cls)
    names = {field.name for field in attrs.fields(cls)}
    wrong = [f"unknown field {name}" for name in sorted(value.keys() - names)]
    wrong += [f"missing field {name}" for name in sorted(names - value.keys())]
    if wrong:
        raise FormatError(", ".join(wrong), path=where, rule="facts.3")
    return cls(**{name: from_plain(hints[name], value[name], f"{where}.{name}") for name in value})


def _wrong(expected: str, value: object, where: str) -> FormatError:
    return FormatError(f"expected {expected}, found {type(value).__name__}", path=where, rule="facts.4")
