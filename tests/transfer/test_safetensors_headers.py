"""Headers of safetensors files: what they say is where the bytes are, or they are refused with their rule."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.errors import FormatError
from coldsnap.transfer.safetensors import DTYPE_BYTES, HEADER_LIMIT_BYTES, index, read_header

TWO = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
}


def write(path, header, data_bytes, *, claimed=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if claimed is None else claimed
    path.write_bytes(length.to_bytes(8, "little") + text + bytes(data_bytes))
    return path


def test_each_tensor_is_where_the_header_says(tmp_path):
    path = write(tmp_path / "x", {**TWO, "__metadata__": {"format": "pt"}}, 26)
    first, second = read_header(path)
    assert (first.name, first.dtype, first.shape, first.length) == ("a", "F32", (2, 3), 24)
    assert second.file_offset == first.file_offset + 24 == path.stat().st_size - 2
    assert first.path == str(path)


@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 4), max_size=3)), max_size=8))
def test_any_file_of_the_safetensors_library_is_read(tmp_path_factory, shapes):
    header, at = {}, 0
    for number, (dtype, shape) in enumerate(shapes):
        size = DTYPE_BYTES[dtype]
        for length in shape:
            size *= length
        header[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    path = write(tmp_path_factory.mktemp("x") / "x", header, at)
    found = read_header(path)
    assert [(one.dtype, list(one.shape)) for one in found] == shapes
    assert sum(one.length for one in found) == at


@pytest.mark.parametrize(
    ("header", "data_bytes", "rule"),
    [
        (b"[]", 0, "safetensors.2"),
        (b"{", 0, "safetensors.2"),
        (b"\xff", 0, "safetensors.2"),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":1}', 1, "safetensors.2"),
        ({"a": 3}, 0, "safetensors.2"),
        ({"a": {**TWO["a"], "more": 1}}, 24, "safetensors.2"),
        ({"a": {**TWO["a"], "shape": [2, True]}}, 24, "safetensors.2"),
        ({"a": {**TWO["a"], "shape": [-2, -3]}}, 24, "safetensors.2"),
        ({"a": {**TWO["a"], "data_offsets": [0]}}, 24, "safetensors.2"),
        (TWO, 25, "safetensors.3"),
        ({"a": {**TWO["a"], "shape": [2, 4]}}, 24, "safetensors.3"),
        ({"a": {**TWO["a"], "data_offsets": [24, 0]}}, 24, "safetensors.3"),
        ({"a": TWO["a"], "b": {**TWO["b"], "data_offsets": [20, 22]}}, 26, "safetensors.3"),
    ],
)
def test_a_header_that_does_not_describe_its_file_is_refused(tmp_path, header, data_bytes, rule):
    path = write(tmp_path / "x", header, data_bytes)
    with pytest.raises(FormatError) as caught:
        read_header(path)
    assert caught.value.rule == rule and caught.value.path == str(path)


@pytest.mark.parametrize("claimed", [100, HEADER_LIMIT_BYTES + 1, (1 << 64) - 1])
def test_a_header_longer_than_its_file_or_the_limit_is_not_read(tmp_path, claimed):
    path = write(tmp_path / "x", b"{}", 0, claimed=claimed)
    with pytest.raises(FormatError, match="safetensors.1"):
        read_header(path)
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # sparse: now the file is long enough, and the limit is what holds
    if claimed > HEADER_LIMIT_BYTES:
        with pytest.raises(FormatError, match="safetensors.1"):
            read_header(path)


def test_what_is_no_regular_file_is_refused(tmp_path):
    with pytest.raises(OSError):
        read_header(tmp_path)
    with pytest.raises(FormatError, match="safetensors.1"):
        read_header("/dev/null")


def test_a_type_of_unknown_width_is_listed_with_its_length(tmp_path):
    path = write(tmp_path / "x", {"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, 2)
    assert [(one.dtype, one.length) for one in read_header(path)] == [("F4", 2)]


def test_files_are_one_index_and_a_name_in_two_of_them_is_refused(tmp_path):
    first = write(tmp_path / "1", {"a": TWO["a"]}, 24)
    second = write(tmp_path / "2", {"b": {**TWO["b"], "data_offsets": [0, 2]}}, 2)
    assert {name: one.path for name, one in index([first, second, first]).items()} == {
        "a": str(first),
        "b": str(second),
    }
    third = write(tmp_path / "3", {"a": TWO["a"]}, 24)
    with pytest.raises(FormatError, match=r"'a' is in .*1 too") as caught:
        index([first, second, third])
    assert caught.value.rule == "safetensors.4"


LOOKS = """
import contextlib, os, sys
from coldsnap.transfer.safetensors import read_header
(stored,) = read_header(sys.argv[1])
marker = bytes(reversed(b"sthgiew fo setyb era esehT"))  # not in this text, so that it is not found by itself
found = 0
# Without buffers of this script's own, which would take the place of what is looked for.
maps, memory = (os.open(f"/proc/self/{name}", os.O_RDONLY) for name in ("maps", "mem"))
lines = b"".join(iter(lambda: os.read(maps, 1 << 20), b""))
for line in lines.decode().splitlines():
    fields = line.split()
    if "[heap]" in line or (len(fields) == 5 and fields[1].startswith("rw")):
        begin, end = (int(part, 16) for part in fields[0].split("-"))
        with contextlib.suppress(OSError):  # pages that nobody can read hold nothing
            found += os.pread(memory, end - begin, begin).count(marker * 2)
print(stored.length, found)
"""


def test_reading_a_header_leaves_no_byte_of_the_weights_in_memory(tmp_path):
    weights = b"These are bytes of weights" * 8192
    header = json.dumps({"a": {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + weights)

    done = subprocess.run([sys.executable, "-c", LOOKS, str(path)], capture_output=True, text=True, check=False)

    assert done.stdout.split() == [str(len(weights)), "0"], done.stderr
