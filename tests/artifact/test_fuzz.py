"""Whatever the bytes are, a reader raises an ArtifactError or reads them; never anything else.

A short pass always runs; ``COLDSNAP_FUZZ_SECONDS=600`` makes it a long one (``docs/format/README.md`` says when one was
run). A failure prints the seed and the bytes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from made import write_artifact
from memory import captured, payload
from test_overlay import TARGET, recapture
from test_store import write_native

from coldsnap.artifact import Artifact, canonical, record
from coldsnap.artifact import descriptor as documents
from coldsnap.artifact.admission import Request, ValidationRecord, decide
from coldsnap.artifact.bootstrap import BootstrapIndex, BootstrapTensor
from coldsnap.artifact.manifest import HibernateState, NativeManifest, RecoveryManifest, decode, encode
from coldsnap.artifact.oci import export_layout, import_layout, manifest_of
from coldsnap.artifact.overlay import Overlays
from coldsnap.artifact.pageimage import read_image, read_pages, write_pages
from coldsnap.artifact.service import Answer, Call, Options
from coldsnap.artifact.store import Store
from coldsnap.artifact.tree import pack_tree, unpack_tree
from coldsnap.errors import ArtifactError

SECONDS = float(os.environ.get("COLDSNAP_FUZZ_SECONDS", "8"))
BINARY = {"pack", "page image", "tree"}

ODD = [
    *(None, True, False, 0, 1, -1, 2**63, 2**64, 2**200, 0.5, -0.0, 1e300),
    *("", "/", "..", "\x00", "\ud800", "sha256:" + "0" * 64, "sha256:" + "G" * 64, "a" * 5000, "٣", "a/../b"),
    *([], {}, [[]], [None], {"": ""}, [1, 2, 3], {"path": "x"}),
]


def mutated(value: object, generator: random.Random) -> object:
    """Change one node of a JSON value: replace, drop, repeat, rename or swap."""
    value = json.loads(json.dumps(value))
    nodes = [value]
    for node in nodes:
        children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        nodes += [child for child in children if isinstance(child, dict | list)]
    node = generator.choice([one for one in nodes if one] or [value])
    if isinstance(node, list) and node:
        index = generator.randrange(len(node))
        match generator.randrange(4):
            case 0:
                node[index] = generator.choice(ODD)
            case 1:
                del node[index]
            case 2:
                node.append(node[index])
            case _:
                node.reverse()
    elif isinstance(node, dict) and node:
        key = generator.choice(list(node))
        match generator.randrange(4):
            case 0 | 1:
                node[key] = nudged(node[key], generator)
            case 2:
                del node[key]
            case _:
                node[generator.choice(["surprise", *node])] = generator.choice(ODD)
    return value


def nudged(value: object, generator: random.Random) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and generator.random() < 0.7:
        return value + generator.choice([-1, 1, 4096, -4096, 1 << 40, -value])
    return generator.choice(ODD)


def scrambled(data: bytes, generator: random.Random) -> bytes:
    """Change bytes: flip, cut, insert, repeat."""
    changed = bytearray(data)
    for _ in range(generator.randint(1, 4)):
        position = generator.randrange(len(changed) + 1)
        match generator.randrange(4):
            case 0 if position < len(changed):
                changed[position] ^= 1 << generator.randrange(8)
            case 1:
                del changed[position : position + generator.randint(1, 40)]
            case 2:
                changed[position:position] = generator.randbytes(generator.randint(1, 8))
            case _:
                changed[position:position] = changed[: generator.randint(0, 60)]
    return bytes(changed)


def sealed(data: bytes) -> bytes:
    """Seal a descriptor anew, so that what it says is looked at."""
    try:
        value = json.loads(data)
    except ValueError:
        return data
    if not isinstance(value, dict):
        return data
    value.pop("seal", None)
    return canonical.encode({**value, "seal": canonical.digest(value)})


@pytest.fixture(name="readers", scope="module")
def _readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bytes, Callable[[bytes], object]]]:
    """Name → a valid file, and what reads it."""
    root = tmp_path_factory.mktemp("fuzz")
    store = Store(root / "store")
    artifact = write_native(root / "native", store)
    (root / "one").mkdir()
    native, recovery, _ = captured(root / "one", store)
    state = HibernateState(worker="0", capture_id="c", pid=1, generation="1", discarded={"kv_cache": 1})
    call = Call(id="0" * 32, token="t" * 20, options=Options(path="/x", record="/x", expected_sha256="x"))
    item = payload(native)
    request = Request(path=str(store.path(item.sha256)), expected_sha256=item.sha256)
    answer = Answer(id="0" * 32, ok=True, admission=decide(request))
    overlays = Overlays(root / "overlays")
    overlays.add(artifact, TARGET, recapture(artifact))
    directory = overlays.directory(artifact, TARGET)
    image = write_artifact(root / "image", files={"capsule/rank0/images/a": b"a"})
    export_layout(image, root / "layout", tag="t")

    def typed(cls: type) -> Callable[[bytes], object]:
        return lambda data: record.read(cls, canonical.decode(data, path="x", max_bytes=1 << 20), path="x")

    def at(path: Path, read: Callable[[], object]) -> tuple[bytes, Callable[[bytes], object]]:
        original = path.read_bytes()

        def through(data: bytes) -> object:
            path.write_bytes(data)
            try:
                return read()
            finally:
                path.write_bytes(original)

        return original, through

    def indexed(data: bytes) -> object:
        (root / "index").write_bytes(data)
        (root / "index").chmod(0o600)
        return BootstrapIndex.read(root / "index", sha256=canonical.sha256_of(data))

    def paged(data: bytes) -> object:
        (root / "pages").write_bytes(data)
        with (root / "pages").open("rb") as file:
            return list(read_pages(file.fileno(), read_image(file.fileno())))

    def imported() -> object:
        try:
            return import_layout(root / "layout", root / "out", tag="t").digest
        finally:
            shutil.rmtree(root / "out", ignore_errors=True)

    tensor = BootstrapTensor(name="a", role="buffer", dtype="F32", shape=(2, 3), stride=(3, 1), allocation=0, offset=64)
    bootstrap = BootstrapIndex(
        capture_id="c", worker="0", tensors=(tensor, attrs.evolve(tensor, name="b", role="parameter"))
    )
    with (root / "pages").open("wb") as file:
        write_pages(file.fileno(), [os.urandom(4096), bytes(4096), b"text" * 1024], block_bytes=4096)

    return {
        "descriptor": (artifact.descriptor.encode(), lambda data: documents.decode(data, path="x")),
        "sealed descriptor": (artifact.descriptor.encode(), lambda data: documents.decode(sealed(data), path="x")),
        "opened descriptor": at(artifact.path / "artifact.json", lambda: Artifact.open(artifact.path)),
        "native": (encode(native), lambda data: decode(NativeManifest, data, path="x")),
        "recovery": (encode(recovery), lambda data: decode(RecoveryManifest, data, path="x")),
        "state": (encode(state), lambda data: decode(HibernateState, data, path="x")),
        "call": (canonical.encode(record.write(call)), typed(Call)),
        "answer": (canonical.encode(record.write(answer)), typed(Answer)),
        "record": (Path(request.record).read_bytes(), typed(ValidationRecord)),
        "record beside its pack": at(Path(request.record), lambda: decide(request)),
        "evidence": at(artifact.path / "evidence.json", artifact.verify),
        "overlay": at(directory / "overlay.json", lambda: overlays.select(artifact, TARGET)),
        "oci manifest": (manifest_of(image).encode(), typed(type(manifest_of(image)))),
        "oci index": at(root / "layout" / "index.json", imported),
        "bootstrap index": (bootstrap.encode(), indexed),
        "page image": ((root / "pages").read_bytes(), paged),
        "tree": (pack_tree({"a/b": b"one", "c": bytes(700)}), lambda data: unpack_tree(data, path="x")),
        "pack": at(store.path(item.sha256), lambda: decide(attrs.evolve(request, verify="full"), index=native.index)),
    }


@pytest.mark.timeout(SECONDS + 300)
def test_readers_raise_artifact_errors_only(readers) -> None:
    seed = random.randrange(1 << 32)
    generator = random.Random(seed)
    deadline = time.monotonic() + SECONDS
    refused, rounds = dict.fromkeys(readers, 0), 0
    while time.monotonic() < deadline:
        rounds += 1
        for name, (valid, read) in readers.items():
            data = valid
            if name not in BINARY and generator.random() < 0.6:
                value = json.loads(valid)
                for _ in range(generator.randint(1, 3)):
                    value = mutated(value, generator)
                data = canonical.encode(value)
            else:
                data = scrambled(valid, generator)
            try:
                read(data)
            except ArtifactError:
                refused[name] += 1
            except Exception as error:
                raise AssertionError(f"seed {seed}, reader {name}, bytes {data[:2000]!r}") from error
    # Damaged evidence and records are as good as none; everything else must have been refused, often.
    lenient = {"evidence", "record beside its pack"}
    assert all(count for name, count in refused.items() if name not in lenient), refused
    print(f"seed {seed}: {rounds} rounds of {len(readers)} readers, refused: {refused}")
