"""Canonical JSON, byte for byte."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.artifact import canonical
from coldsnap.errors import FormatError

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"b": 1, "a": [True, None]}, b'{"a":[true,null],"b":1}'),
        ({"t": "naïve"}, b'{"t":"na\\u00efve"}'),
        ({"t": "\U0001f600"}, b'{"t":"\\ud83d\\ude00"}'),
        ({"t": "\ud800"}, b'{"t":"\\ud800"}'),
        ({"t": "<a&b>"}, b'{"t":"<a&b>"}'),
        ({"t": 'q"\\\n\x01'}, b'{"t":"q\\"\\\\\\n\\u0001"}'),
        ({"n": -0.0}, b'{"n":-0.0}'),
        ({"n": 1e16}, b'{"n":1e+16}'),
        ({"n": 0.0001}, b'{"n":0.0001}'),
        ({"n": 9007199254740993}, b'{"n":9007199254740993}'),
        ({"é": 1, "z": 2, "Z": 3}, b'{"Z":3,"z":2,"\\u00e9":1}'),
    ],
)
def test_each_rule_has_a_vector(value, expected: bytes) -> None:
    assert expected == canonical.encode(value)
    assert value == canonical.decode(expected, path="x", max_bytes=100)


def test_the_digest_vector_is_the_known_one() -> None:
    digest = canonical.digest({"fixed": 0.0001, "large_integer": 9007199254740993, "scientific": 1e16})

    assert digest.startswith("sha256:de1045d0")
    assert digest.endswith("6488")


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_decoding_is_the_inverse_of_encoding(value) -> None:
    data = canonical.encode(value)

    assert data == canonical.encode(canonical.decode(data, path="x", max_bytes=1 << 20))
    assert json.loads(data) == value


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"", "json.1"),
        (b"[]", "json.1"),
        (b"{} {}", "json.1"),
        (b'{"a":NaN}', "json.1"),
        (b'{"a":Infinity}', "json.1"),
        (b'{"a":1e999}', "json.1"),
        (b'{"a":"\xc3\xa9"}', "json.1"),
        (b'\xef\xbb\xbf{"a":1}', "json.1"),
        (b'{"a":' + b"[" * 100_000, "json.1"),
        (b'{"a":' + b"1" * 50 + b"}", "json.1"),
        (b'{"a":1,"a":1}', "json.2"),
        (b'{"b":1,"a":2}', "json.3"),
        (b'{"a": 1}', "json.3"),
        (b'{"a":1}\n', "json.3"),
        (b'{"a":1.0e0}', "json.3"),
        (b'{"a":"' + b"x" * 300 + b'"}', "json.4"),
    ],
)
def test_what_is_not_canonical_is_refused_with_its_rule(data: bytes, rule: str) -> None:
    with pytest.raises(FormatError) as caught:
        canonical.decode(data, path="x", max_bytes=200 if rule == "json.4" else 1 << 20)
    assert rule == caught.value.rule


def test_nan_cannot_be_encoded() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical.encode({"a": float("nan")})
