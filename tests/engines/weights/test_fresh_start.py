"""An engine that never sees the checkpoint answers like the one that loaded it: ``fresh_engine``, in two processes."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from coldsnap.artifact.bootstrap import BootstrapIndex
from coldsnap.artifact.canonical import sha256_of
from coldsnap.artifact.manifest import NativeManifest, read_document

SCRIPT = Path(__file__).parent / "fresh_engine.py"


def run(python, mode, directory, request):
    command = [python, SCRIPT, mode, directory, json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def exporting(directory, library):
    return {
        "worker": "worker-0",
        "directory": str(directory / "worker-0"),
        "store": str(directory / "store"),
        "capture_id": "capture-0001",
        "model": {"model_id": "model", "revision": "0" * 40},
        "discard": [],
        "native_library": library,
        "reserve_bytes": 0,
    }


class Capture:
    """What an engine with a checkpoint left, and others that were started from it, by name of what was asked."""

    def __init__(self, python, directory, library):
        self.directory, self.library = directory, library
        self.seen = run(python, "export", directory, exporting(directory, library))
        self.report = self.seen["report"]
        recovered = run(python, "start", directory, {name: self.request(**more) for name, more in self.recovering()})
        (directory / "model.safetensors").rename(directory / "moved-away")
        self.started = run(python, "start", directory, {name: self.request(**more) for name, more in self.asked()})
        self.started |= recovered

    @property
    def pack(self):
        hexes = self.report["pack"]["sha256"].removeprefix("sha256:")
        return self.directory / "store" / "model-payloads" / "sha256" / f"{hexes}.pack"

    def request(self, **more):
        return {
            "directory": str(self.directory / "worker-0"),
            "pack": str(self.pack),
            "manifest_sha256": self.report["manifest_sha256"],
            "index_sha256": self.report["index_sha256"],
            "native_library": self.library,
            "backend": "python",
            **more,
        }

    def recovering(self):
        """Yield every start that reads the checkpoint."""
        recovery = {"provider": "recovery", "recovery_sha256": self.report["recovery"]["manifest_sha256"], "pack": None}
        for backend in ("auto", "direct", "torch"):
            yield f"recovery, {backend}", {**recovery, "loader": {"backend": backend, "verify_bytes": 64}}
        yield "recovery, other layout", {**recovery, "model": {"layers": 1}}

    def asked(self):
        """Yield every start that a test looks at."""
        for backend in ("python", "buffered", "direct"):
            yield backend, {"backend": backend}
        for name, model in LAYOUTS.items():
            yield name, {"model": model}
        for verify in ("none", "evidence"):
            yield f"spoiled pack, {verify}", {"pack": str(self.spoiled_pack()), "verify": verify}
        name = b"layers.0.norm"
        yield (
            "another index",
            {"directory": str(self.spoiled_index("a", lambda data: data.replace(name, b"layers.0.nor0")))},
        )
        for told, change in (
            ("swapped names", swapped),
            ("another worker", lambda data: data.replace(b"er-0", b"er-1")),
        ):
            directory = self.spoiled_index(told, change)
            digest = sha256_of((directory / "bootstrap-index.json").read_bytes())
            yield told, {"directory": str(directory), "index_sha256": digest}

    def spoiled_pack(self):
        path = self.directory / self.pack.name
        data = bytearray(self.pack.read_bytes())
        data[5] ^= 1
        path.write_bytes(data)
        path.chmod(0o600)
        return path

    def spoiled_index(self, name, change):
        directory = self.directory / name / "worker-0"
        shutil.copytree(self.directory / "worker-0", directory)
        path = directory / "bootstrap-index.json"
        path.write_bytes(change(path.read_bytes()))
        return directory


def swapped(data):
    """Have two parameters of one form change their names: the layout is the same, and the bytes are not theirs."""
    index = json.loads(data)
    first, second = (next(one for one in index["tensors"] if one["name"] == f"layers.{n}.norm") for n in (0, 1))
    first["allocation"], second["allocation"] = second["allocation"], first["allocation"]
    return json.dumps(index, sort_keys=True, separators=(",", ":")).encode()


LAYOUTS = {
    "layers.1.bias is only in the capture": {"layers": 1},
    "layers.2.decay is only in this engine": {"layers": 3},
    "embed: captured parameter BF16 [256, 96] strides [96, 1], found parameter BF16 [256, 64]": {"hidden": 64},
    "embed shares memory with other tensors than at the capture": {"tied": False},
}


@pytest.fixture(scope="module")
def capture(engine_python, native_library, tmp_path_factory):
    return Capture(engine_python, tmp_path_factory.mktemp("fresh"), native_library)


@pytest.mark.parametrize("backend", ["python", "buffered", "direct"])
def test_an_engine_without_the_checkpoint_answers_as_the_one_that_had_it(capture, backend):
    seen = capture.started[backend]

    assert seen["answer"] == capture.seen["answer"]
    assert len(set(seen["answer"]["tokens"])) > 5
    assert seen["report"]["provider"] == "native"


@pytest.mark.parametrize("backend", ["auto", "direct", "torch"])
def test_an_engine_without_the_pack_answers_the_same_out_of_the_checkpoint(capture, backend):
    """Stacked, sharded, converted and padded destinations; what was computed comes from the rest."""
    seen = capture.started[f"recovery, {backend}"]

    assert seen["answer"] == capture.seen["answer"]
    report = seen["report"]
    assert report["provider"] == "recovery"
    assert report["bytes"]["pack"] == report["pack_bytes"] == 0
    assert report["bytes"]["residual"] == capture.started["python"]["report"]["bytes"]["residual"]
    effective = report["receipts"]["checkpoint"]["effective"]
    assert effective.startswith(backend if backend != "auto" else ("direct", "buffered"))


def test_a_recovery_into_another_layout_is_refused_by_name(capture):
    seen = capture.started["recovery, other layout"]

    assert seen["refused"] == "AdmissionError"
    assert "layers.1.bias is only in the capture" in seen["why"]
    assert seen["untouched"]


def test_what_was_copied_comes_from_the_pack_and_all_else_from_the_rest(capture):
    manifest = read_document(
        NativeManifest,
        capture.directory / "worker-0" / "native-manifest.json",
        sha256=capture.report["manifest_sha256"],
    )
    seen = capture.started["python"]["report"]

    assert seen["bytes"]["pack"] == sum(one.size for one in manifest.model_extents)
    assert seen["pack_bytes"] == capture.pack.stat().st_size == manifest.pack.bytes
    assert seen["matched"]["extents"] == len(manifest.model_extents) == 1 + 2 * 5
    # embed and head are one; decay was computed, and the padding of the vocabulary is nobody's.
    assert capture.report["kept"] == {"source-not-aliased": 2 * 96 * 4}
    assert seen["bytes"]["residual"] == 2 * 96 * 4 + 6 * 96 * 2
    assert capture.seen["embed_ends_with_zeros"]


def test_the_index_names_every_parameter_and_persistent_buffer_and_what_the_load_wrote(capture):
    index = BootstrapIndex.read(
        capture.directory / "worker-0" / "bootstrap-index.json", sha256=capture.report["index_sha256"]
    )
    # Not angles: nobody loads them, and they are not persistent.
    layer = ("bias", "decay", "down", "norm", "qkv", "scale")
    names = ["counts", "embed", "head.weight", *(f"layers.{number}.{name}" for number in (0, 1) for name in layer)]

    assert [one.name for one in index.tensors] == names
    places = {one.name: (one.allocation, one.offset) for one in index.tensors}
    assert places["embed"] == places["head.weight"]


@pytest.mark.parametrize("told", LAYOUTS)
def test_another_layout_is_refused_by_name_before_a_byte_is_moved(capture, told):
    seen = capture.started[told]

    assert seen["refused"] == "AdmissionError"
    assert told in seen["why"] and "capture-0001" in seen["why"]
    assert seen["untouched"]


@pytest.mark.parametrize("verify", ["none", "evidence"])
def test_a_pack_with_another_byte_is_refused(capture, verify):
    assert capture.started[f"spoiled pack, {verify}"]["refused"] == "IntegrityError"


def test_an_index_that_is_not_the_one_of_the_artifact_is_refused(capture):
    seen = capture.started["another index"]

    assert seen["refused"] == "IntegrityError" and "bootstrap-index.json" in seen["why"]
    assert seen["untouched"]


def test_an_extent_of_the_pack_that_has_another_name_is_refused_though_the_layout_fits(capture):
    seen = capture.started["swapped names"]

    assert seen["refused"] == "FormatError" and "bootstrap.3" in seen["why"]
    assert seen["untouched"]


def test_the_index_of_another_worker_is_refused(capture):
    seen = capture.started["another worker"]

    assert seen["refused"] == "FormatError" and "bootstrap.1" in seen["why"]
    assert seen["untouched"]


def test_an_export_and_a_release_of_the_same_model_make_one_pack(engine_python, native_library, tmp_path):
    seen = run(engine_python, "release", tmp_path, exporting(tmp_path, native_library))

    assert seen["export"]["pack"]["sha256"] == seen["release"]["pack"]["sha256"]
    assert seen["export"]["pack"]["new_bytes"] == seen["export"]["pack"]["bytes"] > 0
    assert seen["release"]["pack"]["new_bytes"] == 0
