"""Strict typed records: attrs classes to and from JSON values.

The one rule: nothing is coerced, ignored or guessed. An unknown field, a missing one, ``true`` for an integer or a
number in quotes is a FormatError that names the place and the rule (json.5 to json.11 in ``docs/format/json.md``).

cattrs is not used here: manifests hold hundreds of thousands of records that are read between a request and its first
token, and each refusal must carry the number of a rule.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin

import attrs

from coldsnap.artifact.canonical import Json
from coldsnap.errors import FormatError

__all__ = [
    "Broken",
    "at_least",
    "matching",
    "one_of_each",
    "optional",
    "read",
    "relative_path",
    "sha256",
    "write",
    "write_object",
]

T = TypeVar("T")
_Reader: typing.TypeAlias = Callable[[Any, str], Any]


class Broken(ValueError):
    """A value breaks a numbered rule; raised by validators, turned into a FormatError by :func:`read`."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


def read(cls: type[T], value: Json, *, path: str) -> T:
    """Build a record from a decoded JSON value.

    Args:
        cls: An attrs class whose annotations are made of str, int, bool, float, Literal, other attrs classes,
            ``tuple[X, ...]``, ``Mapping[str, X]`` and ``X | None``.
        value: The decoded value.
        path: The file, for the error.

    Returns:
        The record; fields that are absent have the default of the class.

    Raises:
        FormatError: With the rule and the place (``$.field[3].field``).
    """
    try:
        return typing.cast("T", _reader(typing.cast("Any", cls))(value, "$"))
    except _RefusedError as error:
        raise FormatError(str(error), path=f"{path} at {error.place}", rule=error.rule) from None


def write(record: Any) -> Json:
    """Turn a record into a JSON value; fields that are None are left out."""
    if attrs.has(type(record)):
        pairs = ((name, getattr(record, name)) for name in _names(typing.cast("Any", type(record))))
        return {name: write(value) for name, value in pairs if value is not None}
    if isinstance(record, tuple):
        return [write(item) for item in record]
    if isinstance(record, Mapping):
        return {key: write(item) for key, item in record.items()}
    return typing.cast("Json", record)


def write_object(record: Any) -> dict[str, Json]:
    """Turn a record into a JSON object."""
    return typing.cast("dict[str, Json]", write(record))


class _RefusedError(Exception):
    def __init__(self, rule: str, place: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule
        self.place = place


@cache
def _names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in attrs.fields(cls))


@cache
def _reader(kind: Any) -> _Reader:
    origin, args = get_origin(kind), get_args(kind)
    if kind in {str, int, bool, float}:
        return _scalar(kind)
    if origin is Literal:
        return _literal(args)
    if origin is tuple and args[1:] == (...,):
        return _sequence(_reader(args[0]))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(_reader(args[1]))
    if origin in {typing.Union, types.UnionType}:
        # Absence says "none"; null in the file would be a second spelling of the same value.
        (inner,) = (arg for arg in args if arg is not type(None))
        return _reader(inner)
    if attrs.has(kind):
        return _record(kind)
    raise TypeError(f"no strict reader for {kind!r}")


def _scalar(kind: type) -> _Reader:
    def scalar(value: Any, place: str) -> Any:
        if type(value) is not kind:
            raise _RefusedError("json.7", place, f"expected {kind.__name__}, found {type(value).__name__}")
        return value

    return scalar


def _literal(values: tuple[Any, ...]) -> _Reader:
    def literal(value: Any, place: str) -> Any:
        if not any(type(value) is type(known) and value == known for known in values):
            expected = " or ".join(repr(known) for known in values)
            raise _RefusedError("json.8", place, f"expected {expected}, found {_brief(value)}")
        return value

    return literal


def _sequence(inner: _Reader) -> _Reader:
    def sequence(value: Any, place: str) -> Any:
        if type(value) is not list:
            raise _RefusedError("json.7", place, f"expected a list, found {type(value).__name__}")
        return tuple(inner(item, f"{place}[{index}]") for index, item in enumerate(value))

    return sequence


def _mapping(inner: _Reader) -> _Reader:
    def mapping(value: Any, place: str) -> Any:
        if type(value) is not dict:
            raise _RefusedError("json.7", place, f"expected an object, found {type(value).__name__}")
        return {key: inner(item, f"{place}.{key}") for key, item in value.items()}

    return mapping


def _record(cls: type[Any]) -> _Reader:
    hints = typing.get_type_hints(cls)
    fields = attrs.fields(cls)
    readers = {field.name: _reader(hints[field.name]) for field in fields}
    required = frozenset(field.name for field in fields if field.default is attrs.NOTHING)

    def record(value: Any, place: str) -> Any:
        if type(value) is not dict:
            raise _RefusedError("json.7", place, f"expected an object, found {type(value).__name__}")
        for name in value.keys() - readers.keys():
            raise _RefusedError("json.5", place, f"unknown field {name!r}: made by a newer library, or damaged")
        for name in required - value.keys():
            raise _RefusedError("json.6", place, f"the field {name!r} is missing")
        arguments = {name: readers[name](item, f"{place}.{name}") for name, item in value.items()}
        try:
            return cls(**arguments)
        except Broken as error:
            raise _RefusedError(error.rule, place, str(error)) from None

    return record


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Validators for the fields of records; each names the rule it enforces.

Validator: typing.TypeAlias = Callable[[Any, "attrs.Attribute[Any]", Any], None]
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def matching(pattern: str, what: str) -> Validator:
    """Demand that a string matches a pattern as a whole (json.9)."""
    compiled = re.compile(pattern)

    def check(_: Any, field: attrs.Attribute[Any], value: str) -> None:
        if not compiled.fullmatch(value):
            raise Broken("json.9", f"{field.name} must be {what}, found {_brief(value)}")

    return check


def at_least(least: int, *, below: int = 1 << 64) -> Validator:
    """Demand an integer within bounds (json.9)."""

    def check(_: Any, field: attrs.Attribute[Any], value: int) -> None:
        if not least <= value < below:
            raise Broken("json.9", f"{field.name} must be at least {least} and below {below}, found {_brief(value)}")

    return check


def sha256(_: Any, field: attrs.Attribute[Any], value: str) -> None:
    """Demand ``sha256:`` and 64 lowercase hex digits (json.9)."""
    if not _DIGEST.fullmatch(value):
        raise Broken("json.9", f"{field.name} must be sha256: and 64 lowercase hex digits, found {_brief(value)}")


def relative_path(_: Any, field: attrs.Attribute[Any], value: str) -> None:
    """Demand a normal relative path that cannot leave its directory (json.10)."""
    parts = value.split("/")
    if not value or len(value) > 4096 or _CONTROL.search(value) or any(part in {"", ".", ".."} for part in parts):
        raise Broken("json.10", f"{field.name} must be a normal relative path, found {_brief(value)}")


def optional(validator: Validator) -> Validator:
    """Apply a validator unless the value is None."""

    def check(record: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if value is not None:
            validator(record, field, value)

    return check


def one_of_each(key: Callable[[Any], Any], what: str) -> Validator:
    """Demand that no two items of a sequence have the same key (json.11)."""

    def check(_: Any, field: attrs.Attribute[Any], value: tuple[Any, ...]) -> None:
        seen: set[Any] = set()
        for item in value:
            if key(item) in seen:
                raise Broken("json.11", f"{field.name} names the {what} {key(item)!r} twice")
            seen.add(key(item))

    return check
