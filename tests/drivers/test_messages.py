"""Our few messages against what CRIU publishes, and against fields they do not know."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import coldsnap.drivers
from coldsnap.drivers.messages import enum_value, message, parse_proto

PUBLISHED = json.loads(Path(__file__).with_name("published_fields.json").read_text())["messages"]
OURS = parse_proto(Path(coldsnap.drivers.__file__).with_name("criu.proto").read_text())


@pytest.mark.parametrize("name", OURS)
def test_names_numbers_and_types_are_those_that_criu_publishes(name):
    kind, fields = OURS[name]
    published = PUBLISHED[name]
    assert kind == published["kind"]
    for label, type_name, field, number in fields:
        expected = [type_name, number, label == "repeated"] if kind == "message" else number
        assert published["fields"][field] == expected, field


def test_protobuf_is_loaded_when_it_is_asked_for_and_not_by_an_import():
    code = (
        "import sys; from coldsnap.drivers import n610; before = 'google.protobuf' in sys.modules; "
        "n610.load_messages(); print(before, 'google.protobuf' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert told.stdout.split() == ["False", "True"]


def test_fields_nobody_here_knows_survive_an_edit():
    full = message("inet_sk_entry")(id=1, src_port=8000, src_addr=[16777343])
    unknown = bytes([0x70 | 2, 3]) + b"abc" + bytes([0x98, 0x01, 0x05])  # field 14, a message; field 19, a number
    entry = message("inet_sk_entry")()
    entry.ParseFromString(full.SerializeToString() + unknown)
    entry.src_port = 8001
    again = message("inet_sk_entry")()
    again.ParseFromString(entry.SerializeToString())
    assert unknown in entry.SerializeToString()
    assert (again.id, again.src_port, list(again.src_addr)) == (1, 8001, [16777343])


def test_an_enum_value_nobody_here_knows_survives_an_edit():
    memfd = bytes([0x08, 18, 0x10, 7])  # type 18 is a memfd, id 7
    entry = message("file_entry")()
    entry.ParseFromString(memfd)
    assert not entry.HasField("type")
    entry.id = 8
    assert entry.SerializeToString() in {bytes([0x10, 8, 0x08, 18]), bytes([0x08, 18, 0x10, 8])}


def test_the_parser_reads_comments_defaults_and_nested_enums():
    text = """
    // a comment; with { braces }
    message outer { /* more; */ enum inner { A = 0; B = 0x2; }
      optional uint32 small = 1 [default = 0xff, (criu).hex = true]; repeated string names = 2; };
    """
    assert parse_proto(text) == {
        "outer": ("message", [("optional", "uint32", "small", 1), ("repeated", "string", "names", 2)]),
        "inner": ("enum", [("", "", "A", 0), ("", "", "B", 2)]),
    }


def test_enum_values_have_their_numbers():
    assert enum_value("criu_req_type", "RESTORE") == 2
    assert enum_value("criu_network_lock_method", "SKIP") == 3


def test_protobuf_is_not_imported_before_a_message_is_asked_for():
    code = (
        "import sys, coldsnap.drivers.n610; sys.exit(any(name.startswith('google.protobuf') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
