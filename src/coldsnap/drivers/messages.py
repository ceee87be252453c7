"""CRIU's messages as Python classes, built from ``criu.proto`` when first asked for.

The one rule: no generated code. Generated protobuf modules refuse to load under another runtime version than the one
they were generated for; a description built at run time has no such bond. ``criu.proto`` is read with a parser of just
the language it uses (messages, enums, comments, scalar fields), which takes about a millisecond.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["Field", "enum_value", "message", "parse_proto"]

Field = tuple[str, str, str, int]
"""Label, type, name and number of a message field; of an enum value: ``""``, ``""``, name and number."""

_TOKENS = re.compile(r'//[^\n]*|/\*.*?\*/|"[^"]*"|[A-Za-z_][A-Za-z0-9_.]*|-?[0-9]\w*|[{}=;\[\],()]', re.DOTALL)
_SCALARS = {"uint64": 4, "int32": 5, "fixed64": 6, "bool": 8, "string": 9, "bytes": 12, "uint32": 13, "sint32": 17}
_LABELS = {"optional": 1, "required": 2, "repeated": 3}
_MESSAGE, _ENUM = 11, 14


def _tokens(text: str) -> Iterator[str]:
    return (found for found in _TOKENS.findall(text) if not found.startswith(("//", "/*")))


def _statements(tokens: Iterator[str]) -> Iterator[list[str]]:
    """Yield the statements of one block, up to its closing brace; a nested block's head ends with ``{``."""
    statement: list[str] = []
    for part in tokens:
        if part == "}":
            return
        if part == ";":
            if statement:
                yield statement
            statement = []
        elif part == "{":
            yield [*statement, part]
            statement = []
        else:
            statement.append(part)


def _field(statement: list[str]) -> Field:
    if statement[0] in _LABELS:
        label, kind, name = statement[:3]
        return label, kind, name, int(statement[4], 0)
    return "", "", statement[0], int(statement[2], 0)


def parse_proto(text: str) -> dict[str, tuple[str, list[Field]]]:
    """Read the messages and enums of a proto2 text.

    Args:
        text: The file. Options, defaults and reserved ranges are skipped.

    Returns:
        For each name, ``"message"`` or ``"enum"`` and its fields.
    """
    found: dict[str, tuple[str, list[Field]]] = {}
    tokens = _tokens(text)

    def block(kind: str, name: str) -> None:
        fields: list[Field] = []
        found[name] = (kind, fields)
        for statement in _statements(tokens):
            if statement[-1] == "{":
                block(statement[0], statement[1])
            elif statement[0] != "reserved":
                fields.append(_field(statement))

    for statement in _statements(tokens):
        if statement[-1] == "{" and statement[0] in {"message", "enum"}:
            block(statement[0], statement[1])
    return found


@cache
def _pool() -> tuple[Any, dict[str, tuple[str, list[Field]]]]:
    # Imported here: protobuf costs about 20 ms, and planning on a laptop never speaks to CRIU.
    from google.protobuf import descriptor_pb2, descriptor_pool  # noqa: PLC0415

    definitions = parse_proto(files(__package__).joinpath("criu.proto").read_text("utf-8"))
    described = descriptor_pb2.FileDescriptorProto(name="coldsnap/criu.proto", package="coldsnap.criu", syntax="proto2")
    for name, (kind, fields) in definitions.items():
        if kind == "enum":
            values = described.enum_type.add(name=name).value
            for _, _, value, number in fields:
                values.add(name=value, number=number)
            continue
        entry = described.message_type.add(name=name)
        for label, type_name, field_name, number in fields:
            field = entry.field.add(name=field_name, number=number)
            field.label = _LABELS[label]  # type: ignore[assignment]
            if type_name in _SCALARS:
                field.type = _SCALARS[type_name]  # type: ignore[assignment]
            else:
                field.type = _MESSAGE if definitions[type_name][0] == "message" else _ENUM  # type: ignore[assignment]
                field.type_name = f".coldsnap.criu.{type_name}"
    # A pool of our own: the names of CRIU's messages must not meet those of another library in the default pool.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(described)
    return pool, definitions


def load_messages() -> None:
    """Load protobuf and the messages now, a tenth of a second on a busy machine, and not when the first is needed."""
    message("criu_req")


@cache
def message(name: str) -> Any:
    """Return the class of one message.

    Args:
        name: As in ``criu.proto``, for example ``criu_req``.

    Returns:
        A protobuf message class. Fields it does not know are kept by a parse and written again.
    """
    from google.protobuf import message_factory  # noqa: PLC0415

    return message_factory.GetMessageClass(_pool()[0].FindMessageTypeByName(f"coldsnap.criu.{name}"))


def enum_value(enum: str, name: str) -> int:
    """Return the number of an enum's value, for example ``enum_value("criu_req_type", "DUMP")``."""
    return next(number for _, _, value, number in _pool()[1][enum][1] if value == name)
