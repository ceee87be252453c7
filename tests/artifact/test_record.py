"""Records are read strictly: nothing is coerced, ignored or guessed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import pytest
from attrs import field, frozen

from coldsnap.artifact import record
from coldsnap.errors import FormatError


@frozen(kw_only=True)
class Inner:
    path: str = field(validator=record.relative_path)
    size: int = field(default=0, validator=record.at_least(0))


@frozen(kw_only=True)
class Outer:
    kind: Literal["outer", 7] = "outer"
    flag: bool = False
    ratio: float | None = None
    items: tuple[Inner, ...] = field(default=(), validator=record.one_of_each(lambda item: item.path, "path"))
    names: Mapping[str, int] = field(factory=dict)
    digest: str | None = field(default=None, validator=record.optional(record.sha256))


def test_a_record_survives_the_round_trip() -> None:
    outer = Outer(flag=True, ratio=0.5, items=(Inner(path="a/b", size=3), Inner(path="c")), names={"x": 1})

    assert outer == record.read(Outer, record.write(outer), path="x")
    assert "digest" not in record.write_object(outer)


@pytest.mark.parametrize(
    ("value", "rule", "place"),
    [
        ({"odd": 1}, "json.5", "$"),
        ({"items": [{}]}, "json.6", "$.items[0]"),
        ({"flag": 1}, "json.7", "$.flag"),
        ({"flag": "no"}, "json.7", "$.flag"),
        ({"ratio": 1}, "json.7", "$.ratio"),
        ({"ratio": None}, "json.7", "$.ratio"),
        ({"items": {}}, "json.7", "$.items"),
        ({"items": [3]}, "json.7", "$.items[0]"),
        ({"items": [{"path": "a", "size": True}]}, "json.7", "$.items[0].size"),
        ({"items": [{"path": "a", "size": "4096"}]}, "json.7", "$.items[0].size"),
        ({"names": []}, "json.7", "$.names"),
        ({"names": {"x": 1.0}}, "json.7", "$.names.x"),
        ([], "json.7", "$"),
        ({"kind": "inner"}, "json.8", "$.kind"),
        ({"kind": 7.0}, "json.8", "$.kind"),
        ({"items": [{"path": "a", "size": -1}]}, "json.9", "$.items[0]"),
        ({"items": [{"path": "a", "size": 1 << 64}]}, "json.9", "$.items[0]"),
        ({"digest": "sha256:" + "A" * 64}, "json.9", "$"),
        ({"items": [{"path": "/etc/passwd"}]}, "json.10", "$.items[0]"),
        ({"items": [{"path": "a/../b"}]}, "json.10", "$.items[0]"),
        ({"items": [{"path": "a//b"}]}, "json.10", "$.items[0]"),
        ({"items": [{"path": "a\x00"}]}, "json.10", "$.items[0]"),
        ({"items": [{"path": "\ud800"}]}, "json.10", "$.items[0]"),
        ({"items": [{"path": ""}]}, "json.10", "$.items[0]"),
        ({"items": [{"path": "a"}, {"path": "a"}]}, "json.11", "$"),
    ],
)
def test_a_broken_rule_is_named_with_its_place(value, rule: str, place: str) -> None:
    with pytest.raises(FormatError) as caught:
        record.read(Outer, value, path="file.json")
    assert rule == caught.value.rule
    assert f"file.json at {place}" == caught.value.path


def test_a_class_that_cannot_be_read_strictly_is_a_bug_of_ours() -> None:
    @frozen
    class Loose:
        anything: object

    with pytest.raises(TypeError, match="no strict reader"):
        record.read(Loose, {"anything": 1}, path="x")
