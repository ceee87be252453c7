"""An overlay is chosen only where it fits exactly; one that is damaged is an error."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import attrs
import pytest
from made import descriptor, write_artifact
from test_store import write_native

from coldsnap.artifact import Artifact, ArtifactWriter
from coldsnap.artifact.collect import collect
from coldsnap.artifact.overlay import Overlay, Overlays, OverlayTarget, TargetAccelerator, TargetHost
from coldsnap.artifact.store import Store
from coldsnap.describe import overlay_target
from coldsnap.errors import ArtifactError, FormatError, IntegrityError

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))
import fleet  # noqa: E402  the machines of the plans

H200 = TargetAccelerator(gpu_name="NVIDIA H200", compute_capability="9.0", capacity_class_bytes=139 << 30, count=1)
TARGET = OverlayTarget(
    snapshot_driver="n580",
    units=(TargetHost(unit="rank0", host="8d5a", nvidia_driver="580.95.05", accelerators=(H200,)),),
)


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture(name="portable")
def _portable(tmp_path: Path, store: Store) -> Artifact:
    return write_native(tmp_path / "artifacts" / "portable", store)


@pytest.fixture(name="overlays")
def _overlays(tmp_path: Path) -> Overlays:
    return Overlays(tmp_path / "overlays")


def recapture(portable: Artifact, *, images: bytes = b"faster"):
    """Return a capture whose images differ and whose packs are those of the portable artifact."""

    def capture(output: Path) -> Artifact:
        with ArtifactWriter.create(output) as writer:
            writer.directory("capsule/rank0/images")
            (writer.path / "capsule/rank0/images/core-1.img").write_bytes(images)
            for file in portable.path.joinpath("weights/0").iterdir():
                (writer.directory("weights/0") / file.name).write_bytes(file.read_bytes())
            writer.seal("weights/0")
            made = descriptor(writer.seal("capsule/rank0"), capture_id="capture-overlay")
            return writer.commit(attrs.evolve(made, weights=portable.descriptor.weights))

    return capture


def test_a_matching_overlay_is_chosen(portable: Artifact, overlays: Overlays) -> None:
    binding = overlays.add(portable, TARGET, recapture(portable))

    selection = overlays.select(portable, TARGET)
    assert (True, "matched") == (selection.overlay, selection.reason)
    assert binding.overlay_sha256 == selection.artifact.digest
    assert ("images",) == binding.changed
    assert portable.packs == selection.artifact.packs


@pytest.mark.parametrize(
    "elsewhere",
    [
        attrs.evolve(TARGET, snapshot_driver="n610"),
        attrs.evolve(TARGET, units=(attrs.evolve(TARGET.units[0], host="other"),)),
        attrs.evolve(TARGET, units=(attrs.evolve(TARGET.units[0], nvidia_driver="580.95.06"),)),
        attrs.evolve(TARGET, units=(attrs.evolve(TARGET.units[0], accelerators=()),)),
    ],
)
def test_any_other_target_gets_the_portable_artifact(portable: Artifact, overlays: Overlays, elsewhere) -> None:
    overlays.add(portable, TARGET, recapture(portable))

    selection = overlays.select(portable, elsewhere)
    assert (portable, False, "missing") == (selection.artifact, selection.overlay, selection.reason)


def test_an_overlay_that_was_never_finished_is_missing(portable: Artifact, overlays: Overlays) -> None:
    overlays.add(portable, TARGET, recapture(portable))
    directory = overlays.directory(portable, TARGET)
    (directory / "artifact/artifact.json").rename(directory / "artifact/artifact.json.partial")
    assert "missing" == overlays.select(portable, TARGET).reason
    (directory / "overlay.json").unlink()
    assert "missing" == overlays.select(portable, TARGET).reason
    overlays.add(portable, TARGET, recapture(portable))
    assert "matched" == overlays.select(portable, TARGET).reason


def test_a_stale_overlay_is_passed_over_with_the_field_that_says_so(
    portable: Artifact, overlays: Overlays, store: Store, tmp_path: Path
) -> None:
    overlays.add(portable, TARGET, recapture(portable))
    directory = overlays.directory(portable, TARGET)
    other = recapture(portable, images=b"third")(tmp_path / "third")
    os.rename(directory / "artifact", tmp_path / "aside")
    os.rename(other.path, directory / "artifact")

    selection = overlays.select(portable, TARGET)
    assert (portable, "stale: overlay_sha256") == (selection.artifact, selection.reason)
    # The same directory, taken for one of another portable artifact.
    second = write_native(tmp_path / "artifacts" / "second", store, seed=1)
    os.rename(directory.parent, overlays.directory(second, TARGET).parent)
    assert "stale: portable_sha256" == overlays.select(second, TARGET).reason


@pytest.mark.parametrize("damage", ["flip", "truncate", "link", "mode", "descriptor"])
def test_a_damaged_overlay_is_an_error(portable: Artifact, overlays: Overlays, tmp_path: Path, damage: str) -> None:
    overlays.add(portable, TARGET, recapture(portable))
    directory = overlays.directory(portable, TARGET)
    path = directory / "overlay.json"
    data = path.read_bytes()
    match damage:
        case "flip":
            path.write_bytes(data.replace(b"NVIDIA", b"NVIDIB"))
        case "truncate":
            path.write_bytes(data[:-5])
        case "link":
            path.rename(tmp_path / "moved.json")
            path.symlink_to(tmp_path / "moved.json")
        case "mode":
            path.chmod(0o644)
        case "descriptor":
            descriptor_path = directory / "artifact/artifact.json"
            descriptor_path.write_bytes(descriptor_path.read_bytes().replace(b"Paris", b"Lyons"))

    with pytest.raises((FormatError, IntegrityError)):
        overlays.select(portable, TARGET)


def test_every_flip_of_a_binding_is_an_error_or_stale(portable: Artifact, overlays: Overlays) -> None:
    overlays.add(portable, TARGET, recapture(portable))
    path = overlays.directory(portable, TARGET) / "overlay.json"
    data = path.read_bytes()
    harmless = range(data.index(b'"created_unix_ns":') + 18, data.index(b'"created_unix_ns":') + 37)
    changed = range(data.index(b'"changed":["') + 12, data.index(b'"changed":["') + 18)

    for offset in set(range(len(data))) - set(harmless) - set(changed):
        flipped = bytearray(data)
        flipped[offset] ^= 1
        path.write_bytes(flipped)
        try:
            assert overlays.select(portable, TARGET).reason.startswith("stale: "), offset
        except ArtifactError:
            continue


def test_a_capture_that_changed_nothing_is_discarded(portable: Artifact, overlays: Overlays) -> None:
    assert overlays.add(portable, TARGET, recapture(portable, images=b"core")) is None
    assert not overlays.directory(portable, TARGET).exists()


def test_an_overlay_with_other_packs_is_refused_and_removed(
    portable: Artifact, overlays: Overlays, store: Store
) -> None:
    with pytest.raises(ArtifactError, match=r"rule overlay\.3"):
        overlays.add(portable, TARGET, lambda output: write_native(output, store, seed=7))
    assert not overlays.directory(portable, TARGET).exists()


def test_a_failed_capture_leaves_no_overlay(portable: Artifact, overlays: Overlays) -> None:
    def failing(output: Path) -> Artifact:
        with ArtifactWriter.create(output):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        overlays.add(portable, TARGET, failing)
    assert "missing" == overlays.select(portable, TARGET).reason


def test_overlays_are_roots_of_garbage_collection(
    portable: Artifact, overlays: Overlays, store: Store, tmp_path: Path
) -> None:
    overlays.add(portable, TARGET, recapture(portable))

    kept = collect(store, [overlays.root], grace_s=-60).kept
    assert [str(overlays.directory(portable, TARGET) / "artifact")] == [
        reason.removeprefix("named by ") for _, reason in kept
    ]


def test_a_key_is_made_of_its_target() -> None:
    assert 24 == len(TARGET.key)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Overlay(
            target=TARGET,
            target_key="0" * 24,
            portable_sha256="sha256:" + "0" * 64,
            overlay_sha256="sha256:" + "0" * 64,
            changed=(),
            created_unix_ns=1,
        )
    assert "overlay.5" == caught.value.rule


def test_an_artifact_without_packs_can_have_an_overlay(tmp_path: Path, overlays: Overlays) -> None:
    portable = write_artifact(tmp_path / "image")

    def capture(output: Path) -> Artifact:
        return write_artifact(output, files={"capsule/rank0/images/core-1.img": b"other"})

    assert overlays.add(portable, TARGET, capture)
    assert overlays.select(portable, TARGET).overlay


def test_a_target_is_described_by_the_facts_of_its_host_and_the_gpus_placed(
    portable: Artifact, overlays: Overlays
) -> None:
    host = fleet.gpu_host("580.95.05", count=2)

    both, one = (overlay_target("rank0", host, ordinals, "n580", machine="8d5a") for ordinals in ((), (1,)))

    assert [2] == [kind.count for kind in both.units[0].accelerators]
    assert [1] == [kind.count for kind in one.units[0].accelerators]
    assert "580.95.05" == both.units[0].nvidia_driver
    assert () == overlay_target("rank0", fleet.cpu_host(), (), "n610", machine="8d5a").units[0].accelerators
    overlays.add(portable, one, recapture(portable))
    assert overlays.select(portable, one).overlay
    assert not overlays.select(portable, both).overlay
