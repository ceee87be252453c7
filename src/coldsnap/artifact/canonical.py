"""Canonical JSON: one value, one byte string, one digest.

The one rule: what is digested is exactly ``encode(value)``, so that two implementations that agree on a value agree
on its digest. The rules are numbered in ``docs/format/json.md``; every reader of this package starts with
:func:`decode`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeAlias

from coldsnap.errors import FormatError

__all__ = ["Json", "decode", "digest", "encode", "hex_of", "sha256_of"]

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

_MAX_DIGITS = 40  # no field is wider than a u128; Python's own limit (4300) would raise an error without a rule


def encode(value: Json) -> bytes:
    """Encode as canonical JSON: sorted keys, no spaces, ASCII only, no NaN.

    Args:
        value: Anything JSON can say. ``-0.0`` stays ``-0.0``, integers of any size stay exact.

    Returns:
        The bytes, without a newline at the end.

    Raises:
        ValueError: The value holds NaN or an infinity, which JSON cannot say.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii")


def sha256_of(data: bytes | bytearray | memoryview) -> str:
    """Return ``sha256:<64 hex>`` of bytes in memory."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def digest(value: Json) -> str:
    """Return ``sha256:<64 hex>`` of the canonical encoding of a value."""
    return sha256_of(encode(value))


def hex_of(digest: str) -> str:
    """Return the bare hex digits of a ``sha256:`` digest."""
    return digest.removeprefix("sha256:")


def decode(data: bytes, *, path: str, max_bytes: int, exact: bool = True) -> dict[str, Json]:
    """Read one JSON object under the rules json.1 to json.4.

    Args:
        data: The whole file.
        path: Where it came from, for the error.
        max_bytes: The size limit of this kind of document, bytes.
        exact: Demand that the bytes are the canonical ones.

    Returns:
        The object, not yet typed.

    Raises:
        FormatError: With the rule that was broken.
    """
    if len(data) > max_bytes:
        raise FormatError(f"{len(data)} bytes where at most {max_bytes} are allowed", path=path, rule="json.4")
    try:
        value = json.loads(
            data.decode("ascii"), object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_int=_bounded_int
        )
        canonical = not exact or encode(value) == data
    except _TwiceError as error:
        raise FormatError(str(error), path=path, rule="json.2") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not one JSON object in ASCII: {error}", path=path, rule="json.1") from None
    if not isinstance(value, dict):
        raise FormatError(f"a JSON object was expected, found {type(value).__name__}", path=path, rule="json.1")
    if not canonical:
        raise FormatError("the bytes are not the canonical encoding of what they say", path=path, rule="json.3")
    return value


class _TwiceError(ValueError):
    """A key stands twice in one object."""


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in result if keys.count(key) > 1)
        raise _TwiceError(f"the key {twice!r} appears twice")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _bounded_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)
