"""A policy as text for people: one leaf, or all of them as a table.

The one rule: what it prints comes from the table of leaves alone, so that it cannot disagree with what is checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coldsnap.errors import PolicyError
from coldsnap.policy.leaf import Leaf, flat, leaves_of
from coldsnap.policy.limits import GIB, MIB, did_you_mean, literal

if TYPE_CHECKING:
    from coldsnap.policy.layers import ResolvedPolicy

__all__ = ["describe", "shown", "table"]

_MEANING_CHARACTERS = 80


def shown(row: Leaf, value: Any) -> str:
    """Write a value of a leaf, sizes also in binary units."""
    text = literal(value)
    if row.unit == "bytes" and value and value % MIB == 0:
        return f"{text} ({value // GIB} GiB)" if value % GIB == 0 else f"{text} ({value // MIB} MiB)"
    return text


def _short(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: characters - 1].rstrip(" ,.") + "…"


def table(resolved: ResolvedPolicy) -> str:
    """Return every leaf in a row: value, layer that set it, what is allowed, what it means in short."""
    values = flat(resolved.policy)
    rows = [("leaf", "value", "set by", "allowed", "meaning")]
    for row in leaves_of(type(resolved.policy)):
        value = _short(shown(row, values[row.path]), 40)
        meaning = _short(row.doc, _MEANING_CHARACTERS)
        rows.append((row.path, value, resolved.provenance[row.path], _short(row.allowed, 48), meaning))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in rows
    )


def describe(resolved: ResolvedPolicy, path: str) -> str:
    """Return everything about one leaf.

    Raises:
        PolicyError: No leaf has this path.
    """
    rows = {row.path: row for row in leaves_of(type(resolved.policy))}
    if path not in rows:
        raise PolicyError([(f"$.{path}", f"is no leaf of the policy{did_you_mean(path, rows)}")], what="question")
    row = rows[path]
    facts = (
        ("value", shown(row, resolved[path])),
        ("set by", resolved.provenance[path]),
        ("default", shown(row, row.default)),
        ("type", f"{row.type}, in {row.unit}" if row.unit else row.type),
        ("allowed", row.allowed),
    )
    return "\n".join([path, *(f"  {name:<8} {text}" for name, text in facts), f"  {row.doc}"])
