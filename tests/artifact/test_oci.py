"""An artifact goes through a layout directory and through a real registry and comes out the same."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import attrs
import pytest
from made import in_mounts_of_its_own, write_artifact
from memory import captured
from test_store import write_native

from coldsnap.artifact import Artifact
from coldsnap.artifact.oci import export_layout, import_layout, manifest_of, pull, push
from coldsnap.artifact.store import Store
from coldsnap.errors import ArtifactError, FormatError, IntegrityError

FILES = {
    "capsule/rank0/images/pages-1.img": os.urandom(300_000),
    "capsule/rank0/images/core-1.img": b"core",
    "capsule/rank0/images/empty.img": b"",
    "capsule/rank0/volatile/psm_1": b"core",
}


@pytest.fixture(name="artifact")
def _artifact(tmp_path: Path) -> Artifact:
    return write_artifact(tmp_path / "made", files=FILES)


@pytest.fixture(name="registry", scope="module")
def _registry(tmp_path_factory: pytest.TempPathFactory):
    """A registry server of this machine's packages, on a free port."""
    server = shutil.which("docker-registry") or shutil.which("registry")
    assert server, "apt-get install docker-registry"
    root = tmp_path_factory.mktemp("registry")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = {
        "version": "0.1",
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(root)}, "delete": {"enabled": True}},
        "http": {"addr": address},
    }
    (root / "config.yml").write_text(json.dumps(config))
    with (root / "log").open("wb") as log:
        served = subprocess.Popen([server, "serve", str(root / "config.yml")], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while not reachable(address):
            assert served.poll() is None and time.monotonic() < deadline, (root / "log").read_text()
            time.sleep(0.02)
        yield address, root
    finally:
        served.terminate()
        served.wait(20)


def reachable(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_a_layout_gives_back_the_same_artifact(artifact: Artifact, tmp_path: Path) -> None:
    export_layout(artifact, tmp_path / "layout", tag="one")

    again = import_layout(tmp_path / "layout", tmp_path / "again", tag="one")

    assert artifact.digest == again.digest
    assert 0 == again.verify().bytes_hashed
    assert again.verify("full")
    for name, data in FILES.items():
        assert data == (again.path / name).read_bytes()


def test_each_file_is_a_blob_under_its_listed_digest(artifact: Artifact, tmp_path: Path) -> None:
    digest = export_layout(artifact, tmp_path / "layout", tag="one")
    manifest = json.loads((tmp_path / "layout/blobs/sha256" / digest[7:]).read_bytes())

    listed = {file.path: file.sha256 for file in artifact.descriptor.files if file.bytes}
    assert listed == {one["annotations"]["org.opencontainers.image.title"]: one["digest"] for one in manifest["layers"]}
    # core-1.img and psm_1 have the same content: one blob. Besides them: pages, descriptor, manifest.
    assert 4 == len(list((tmp_path / "layout/blobs/sha256").iterdir()))
    by_hand = subprocess.run(
        "jq -r '.manifests[0].digest[7:]' index.json"
        " | xargs -I{} jq -r '.layers[]|\"\\(.digest[7:])  blobs/sha256/\\(.digest[7:])\"' blobs/sha256/{}"
        " | sha256sum -c --quiet",
        shell=True,
        cwd=tmp_path / "layout",
        check=False,
    )
    assert 0 == by_hand.returncode


def test_several_artifacts_share_one_layout(artifact: Artifact, tmp_path: Path) -> None:
    other = write_artifact(tmp_path / "other", files={"capsule/rank0/images/core-1.img": b"core"})
    export_layout(artifact, tmp_path / "layout", tag="one")
    digest = export_layout(other, tmp_path / "layout", tag="two")
    export_layout(other, tmp_path / "layout", tag="two")

    assert 2 == len(json.loads((tmp_path / "layout/index.json").read_bytes())["manifests"])
    assert other.digest == import_layout(tmp_path / "layout", tmp_path / "again", tag="two").digest
    assert other.digest == import_layout(tmp_path / "layout", tmp_path / "third", tag=digest).digest


def test_the_pack_is_never_inside(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    artifact = write_native(tmp_path / "native", store)
    export_layout(artifact, tmp_path / "layout", tag="one")

    pack = store.packs()[0]
    assert not (tmp_path / "layout/blobs/sha256" / pack.sha256[7:]).exists()
    again = import_layout(tmp_path / "layout", tmp_path / "again", tag="one")
    assert artifact.packs == again.packs
    assert captured.__doc__


@pytest.mark.parametrize("which", ["layer", "config", "manifest"])
@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_a_damaged_layout_is_refused_and_leaves_nothing(
    artifact: Artifact, tmp_path: Path, which: str, how: str
) -> None:
    digest = export_layout(artifact, tmp_path / "layout", tag="one")
    manifest = manifest_of(artifact)
    victim = {"layer": manifest.layers[0].digest, "config": manifest.config.digest, "manifest": digest}[which]
    path = tmp_path / "layout/blobs/sha256" / victim[7:]
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    with pytest.raises(ArtifactError):
        import_layout(tmp_path / "layout", tmp_path / "again", tag="one")
    assert not (tmp_path / "again").exists()


def test_what_a_killed_export_left_goes_with_the_next_one(artifact: Artifact, tmp_path: Path) -> None:
    export_layout(artifact, tmp_path / "layout", tag="one")
    before = sorted((tmp_path / "layout").rglob("*"))
    for place in ("layout/.index.json.partial-00", "layout/blobs/sha256/.0c9e.partial-00"):
        (tmp_path / place).write_bytes(b"half")

    export_layout(artifact, tmp_path / "layout", tag="one")

    assert before == sorted((tmp_path / "layout").rglob("*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small filesystem")
def test_an_export_to_a_full_disk_leaves_no_half_blob(tmp_path: Path) -> None:
    artifact = write_artifact(tmp_path / "one", files={"capsule/rank0/images/a": os.urandom(1 << 20)})
    (tmp_path / "small").mkdir()
    script = f"""
import subprocess
from pathlib import Path
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "none", {str(tmp_path / "small")!r}], check=True)
from coldsnap.artifact import Artifact
from coldsnap.artifact.oci import export_layout
small = Path({str(tmp_path / "small")!r})
try:
    export_layout(Artifact.open({str(artifact.path)!r}), small / "layout", tag="t")
except OSError as error:
    print(error.strerror, [path.name for path in small.rglob("*") if path.is_file()])
"""
    assert (0, "No space left on device []\n", "") == in_mounts_of_its_own(script)


def test_layers_that_are_not_the_listed_files_are_refused(artifact: Artifact, tmp_path: Path) -> None:
    export_layout(artifact, tmp_path / "layout", tag="one")
    manifest = manifest_of(artifact)
    fewer = attrs.evolve(manifest, layers=manifest.layers[1:])
    moved = attrs.evolve(
        manifest,
        layers=(
            attrs.evolve(manifest.layers[0], annotations={"org.opencontainers.image.title": "../out"}),
            *manifest.layers[1:],
        ),
    )
    for odd in (fewer, moved):
        data = odd.encode()
        digest = __import__("hashlib").sha256(data).hexdigest()
        (tmp_path / "layout/blobs/sha256" / digest).write_bytes(data)
        index = json.loads((tmp_path / "layout/index.json").read_bytes())
        index["manifests"][0]["digest"] = f"sha256:{digest}"
        (tmp_path / "layout/index.json").write_text(json.dumps(index))
        with pytest.raises(FormatError, match=r"oci\.3"):
            import_layout(tmp_path / "layout", tmp_path / "again", tag="one")
    with pytest.raises(ArtifactError, match="has no artifact"):
        import_layout(tmp_path / "layout", tmp_path / "again", tag="nine")


def test_a_registry_gives_back_the_same_artifact(artifact: Artifact, tmp_path: Path, registry) -> None:
    address, _ = registry
    by_digest = push(artifact, f"{address}/team/engine:one", insecure=True)

    assert by_digest.startswith(f"{address}/team/engine@sha256:")
    for number, reference in enumerate((f"{address}/team/engine:one", by_digest)):
        again = pull(reference, tmp_path / f"again{number}", insecure=True)
        assert artifact.digest == again.digest
        assert again.verify("full")


def test_large_blobs_go_in_pieces(artifact: Artifact, tmp_path: Path, registry) -> None:
    reference = f"{registry[0]}/team/pieces:one"
    push(artifact, reference, insecure=True, chunk_bytes=100_000)

    assert artifact.digest == pull(reference, tmp_path / "again", insecure=True).digest


def test_pushing_again_sends_no_blob(artifact: Artifact, registry) -> None:
    address, root = registry
    reference = f"{address}/team/again:one"
    first = push(artifact, reference, insecure=True)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("data")}

    assert first == push(artifact, reference, insecure=True)
    assert before == {path: path.stat().st_mtime_ns for path in root.rglob("data")}


def test_a_blob_damaged_in_the_registry_is_refused_and_leaves_nothing(
    artifact: Artifact, tmp_path: Path, registry
) -> None:
    address, root = registry
    other = write_artifact(tmp_path / "other", files={"capsule/rank0/images/core-1.img": os.urandom(1000)})
    reference = f"{address}/team/damaged:one"
    push(other, reference, insecure=True)
    digest = manifest_of(other).layers[0].digest[7:]
    (blob,) = root.glob(f"**/blobs/sha256/{digest[:2]}/{digest}/data")
    blob.write_bytes(b"x" * 1000)

    with pytest.raises(ArtifactError):
        pull(reference, tmp_path / "again", insecure=True)
    assert not (tmp_path / "again").exists()


def test_an_absent_tag_and_an_absent_registry_are_named(artifact: Artifact, tmp_path: Path, registry) -> None:
    with pytest.raises(ArtifactError, match="404"):
        pull(f"{registry[0]}/team/nothing:one", tmp_path / "again", insecure=True)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(ArtifactError, match="cannot be reached"):
            push(artifact, f"{address}/team/engine:one", insecure=True)


def test_a_damaged_artifact_is_not_exported(artifact: Artifact, tmp_path: Path, registry) -> None:
    (artifact.path / "capsule/rank0/images/core-1.img").write_bytes(b"eroc")

    with pytest.raises(IntegrityError):
        export_layout(artifact, tmp_path / "layout", tag="one")
    with pytest.raises(IntegrityError):
        push(artifact, f"{registry[0]}/team/bad:one", insecure=True)
