"""The library is checked before it is loaded, exports what its header says, and needs no GPU software."""

import ctypes
import hashlib
import importlib.resources
import os
import shutil
import subprocess
import sys
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_build import ROOT

from coldsnap.errors import NativeError
from coldsnap.transfer import interface, native
from coldsnap.transfer.native import NativeLibrary

HEADER = ROOT / "csrc" / "include" / "coldsnap_io.h"


def test_the_expected_digest_admits_the_library(built):
    path = built / "libcoldsnap_io.so"

    assert NativeLibrary.load(path, sha256=hashlib.sha256(path.read_bytes()).hexdigest()).path == path


def test_another_digest_is_refused_before_a_byte_of_it_runs(built, tmp_path):
    path = tmp_path / "libcoldsnap_io.so"
    shutil.copy(built / "libcoldsnap_io.so", path)
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"x")

    with pytest.raises(NativeError, match=f"io.native_sha256 expects {expected}"):
        NativeLibrary.load(path, sha256=expected)

    with open("/proc/self/maps") as maps:
        assert str(path) not in maps.read()


def test_two_libraries_are_two(built, tmp_path):
    """glibc knows what it has loaded by its name; a name under /proc that is used again would lead to the first."""
    path = tmp_path / "libcoldsnap_io.so"
    shutil.copy(built / "libcoldsnap_io.so", path)

    first, second = NativeLibrary.load(built / "libcoldsnap_io.so"), NativeLibrary.load(path)

    assert first._library._handle != second._library._handle
    assert first._library._handle == NativeLibrary.load(built / "libcoldsnap_io.so")._library._handle


def test_an_absent_library_is_named_with_what_to_do(tmp_path):
    with pytest.raises(NativeError, match="absent.so cannot be opened.*or set io.hydration_backend"):
        NativeLibrary.load(tmp_path / "absent.so")


def test_what_is_no_library_is_refused(tmp_path):
    path = tmp_path / "text.so"
    path.write_text("not a library")

    with pytest.raises(NativeError, match="is not a usable native I/O library"):
        NativeLibrary.load(path)


def compiled(source, target, *flags):
    text = target.with_suffix(".c")
    text.write_text(source)
    done = subprocess.run(
        ["cc", "-Wall", "-Werror", "-I", HEADER.parent, *flags, "-o", target, text], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.parametrize("sha256", [None, "0" * 64])
def test_a_directory_in_the_place_of_a_library_is_refused(tmp_path, sha256):
    with pytest.raises(NativeError, match="is not a regular file"):
        NativeLibrary.load(tmp_path, sha256=sha256)


def test_a_library_of_another_interface_is_refused(tmp_path):
    names = [f"coldsnap_io_{name}" for name in interface.SIGNATURES if name != "abi_version"]
    functions = "".join(f"void {name}(void) {{}}\n" for name in names)
    path = compiled(
        "int coldsnap_io_abi_version(void) { return 1; }\n" + functions, tmp_path / "other.so", "-shared", "-fPIC"
    )

    with pytest.raises(NativeError, match="has interface version 1"):
        NativeLibrary.load(path)


def test_the_packaged_library_is_found_or_its_absence_explained():
    packaged = importlib.resources.files("coldsnap.transfer").joinpath(native.LIBRARY_NAME)

    if packaged.is_file():
        assert NativeLibrary.load().statistics().ring_bytes == 0
    else:  # a source tree that was never built
        with pytest.raises(NativeError, match="reinstall coldsnap"):
            NativeLibrary.load()


def test_structures_are_laid_out_as_the_header_says(tmp_path):
    """The header is plain C, and ctypes sees the same fields at the same places."""
    pairs = {
        "extent": interface.Extent,
        "options": interface.Options,
        "range": interface.Range,
        "result": interface.Result,
        "error": interface.Error,
        "statistics": interface.Statistics,
        "match": interface.Match,
        "sha256_stream": interface.Stream,
        "sha256_part": interface.Part,
        "span": interface.Span,
        "image": interface.Image,
        "image_result": interface.ImageResult,
    }
    lines = []
    for name, structure in pairs.items():
        lines.append(f'printf("{name} %zu\\n", sizeof(coldsnap_io_{name}));')
        lines += [
            f'printf("{name}.{field[0]} %zu\\n", offsetof(coldsnap_io_{name}, {field[0]}));'
            for field in structure._fields_
        ]
    program = compiled(
        '#include <stdio.h>\n#include "coldsnap_io.h"\nint main(void) {' + "".join(lines) + "return 0; }",
        tmp_path / "layout",
        "-std=c11",
    )

    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()

    expected = []
    for name, structure in pairs.items():
        expected.append(f"{name} {ctypes.sizeof(structure)}")
        expected += [f"{name}.{field[0]} {getattr(structure, field[0]).offset}" for field in structure._fields_]
    assert printed == expected


def symbols(path, *flags):
    return subprocess.run(["nm", "-D", *flags, path], capture_output=True, text=True, check=True).stdout


def test_only_the_interface_is_exported(built):
    exported = {
        line.split()[-1].split("@")[0] for line in symbols(built / "libcoldsnap_io.so", "--defined-only").splitlines()
    }

    assert exported - {"COLDSNAP_IO_1"} == {f"coldsnap_io_{name}" for name in interface.SIGNATURES}


def test_nothing_but_the_c_library_is_needed(built):
    text = subprocess.run(
        ["readelf", "-d", built / "libcoldsnap_io.so"], capture_output=True, text=True, check=True
    ).stdout
    needed = {line.split("[")[1].rstrip("]") for line in text.splitlines() if "(NEEDED)" in line}

    assert needed <= {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "libpthread.so.0", "libdl.so.2"}
    assert "io_uring" not in symbols(built / "libcoldsnap_io.so")


def test_a_machine_without_a_driver_says_so(built):
    script = f"""
from coldsnap.transfer.native import NativeLibrary
library = NativeLibrary.load({str(built / "libcoldsnap_io.so")!r})
print(library.on(0).unavailable("direct"))
print(library.unavailable("direct"), library.unavailable("buffered", capture=True))
print(library.unavailable("gds"))
try:
    library.load_cuda("/absent/libcuda.so")
except Exception as error:
    print(type(error).__name__, error.status)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    device, host, gds, loaded = done.stdout.splitlines()

    assert "CUDA driver cannot be loaded" in device or "finds no device" in device or device == "None"
    assert host == "None None"
    assert gds == "gds needs a device"
    assert loaded == "NativeError 2"


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=5000), split=st.integers(0, 5000), crc=st.integers(0, 2**32 - 1))
def test_checksums_are_those_of_zlib_and_hashlib(data, split, crc, library):
    buffer = memoryview(bytearray(data))
    first, second = data[:split], data[split:]

    assert library.crc32(buffer, crc) == zlib.crc32(data, crc)
    assert library.sha256(buffer) == hashlib.sha256(data).digest()
    assert library.crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(data)


def test_checksums_of_long_buffers(library):
    data = memoryview(bytearray(os.urandom(5_000_003)))

    assert library.crc32(data) == zlib.crc32(data)
    assert library.sha256(data) == hashlib.sha256(data).digest()
    assert library.crc32_combine(1, 2, 0) == 1 ^ 2


def test_the_library_passes_its_own_test(built, tmp_path):
    """What the sanitizers run, without them."""
    done = subprocess.run(
        [built / "tests" / "io_selftest", built / "tests" / "libcuda_shim.so", tmp_path, "4"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_options_that_contradict_each_other_are_refused(library, host, tmp_path):
    from coldsnap.transfer.backend import FileExtent, Tuning
    from coldsnap.transfer.hydrate import hydrate

    path = tmp_path / "pack"
    path.write_bytes(b"x" * 8192)
    region = host.allocate(8192, tag="t")
    extents = [FileExtent(file_offset=0, address=region.address, length=8192)]

    for backend, access in (("buffered", "register"), ("direct", "register")):
        with pytest.raises(NativeError, match="for buffered transfers to a device"):
            hydrate(path, extents, memory=host, library=library, backend=backend, tuning=Tuning(access=access))
    for wrong in ({"queue_depth": 65}, {"chunk_bytes": 100}, {"slice_bytes": 5}, {"queue_depth": 0}):
        with pytest.raises(ValueError):
            Tuning(**wrong)
    with pytest.raises(ValueError, match="needs its CRC-32"):
        FileExtent(file_offset=0, address=0, length=1, sha256=bytes(32))


def test_no_native_backend_without_the_library(host, tmp_path):
    from coldsnap.transfer.hydrate import hydrate

    (tmp_path / "pack").write_bytes(b"x")

    with pytest.raises(NativeError, match="needs the native I/O library"):
        hydrate(tmp_path / "pack", [], memory=host, library=None, backend="direct")


def test_importing_transfer_imports_no_torch_and_loads_no_driver():
    script = """
import sys
import coldsnap.transfer.hydrate, coldsnap.transfer.capture, coldsnap.transfer.prefetch, coldsnap.transfer.cuda_memory
print(sorted({"torch", "vllm", "sglang", "cuda"} & {name.split(".")[0] for name in sys.modules}))
print("libcuda" in open("/proc/self/maps").read())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\nFalse\n"
