"""The format documents and the code speak of the same rules, and what the documents say to do by hand works."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from test_overlay import TARGET, recapture
from test_store import write_native

import coldsnap
from coldsnap.artifact import canonical
from coldsnap.artifact import descriptor as documents
from coldsnap.artifact.collect import verify_artifact
from coldsnap.artifact.overlay import Overlays
from coldsnap.artifact.store import Store

DOCUMENTS = Path(__file__).parents[2] / "docs" / "format"
CODE = Path(coldsnap.__file__).parent / "artifact"
RULE = re.compile(r"\b(?:json|descriptor|evidence|pack|extent|manifest|store|validation|overlay|oci|pageimage)\.\d+\b")
# What a restore does with memory is enforced by those who restore; here are the words.
ELSEWHERE = {"manifest.6", "manifest.7", "manifest.8"}


def documented() -> set[str]:
    text = "".join(path.read_text() for path in DOCUMENTS.glob("*.md"))
    return set(re.findall(rf"^- \*\*({RULE.pattern})\*\*", text, flags=re.MULTILINE))


def test_every_rule_that_the_code_cites_is_documented() -> None:
    cited = {rule for path in CODE.glob("*.py") for rule in RULE.findall(path.read_text())}

    assert cited <= documented()


def test_every_documented_rule_is_held_by_code_or_by_a_test() -> None:
    paths = (*CODE.glob("*.py"), *(path for path in Path(__file__).parent.glob("*.py") if path != Path(__file__)))
    cited = set(ELSEWHERE)
    for path in paths:
        text = path.read_text()
        cited |= set(RULE.findall(text))
        for name, first, last in re.findall(r"\b(\w+)\.(\d+) to (?:\w+\.)?(\d+)", text):
            cited |= {f"{name}.{number}" for number in range(int(first), int(last) + 1)}

    assert documented() <= cited


def test_rules_are_numbered_from_one_without_a_hole() -> None:
    by_name: dict[str, set[int]] = {}
    for rule in documented():
        name, _, number = rule.partition(".")
        by_name.setdefault(name, set()).add(int(number))

    assert all(numbers == set(range(1, max(numbers) + 1)) for numbers in by_name.values()), by_name


def test_the_sample_descriptor_is_one() -> None:
    text = (DOCUMENTS / "descriptor.md").read_text()
    sample = json.loads(re.search(r"```json\n(.*?)```", text, flags=re.DOTALL)[1])

    assert "packs" == documents.decode(canonical.encode(sample), path="sample")[0].weights.kind


@pytest.fixture(name="made")
def _made(tmp_path: Path):
    store = Store(tmp_path / "store")
    artifact = write_native(tmp_path / "native", store)
    verify_artifact(artifact, store, "full")
    return artifact, store


def shell(command: str, directory: Path) -> str:
    ended = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert 0 == ended.returncode, (command, ended.stdout, ended.stderr)
    return ended.stdout


def test_the_seal_and_the_files_are_checked_by_hand(made) -> None:
    artifact, _ = made

    seal = shell("""sed 's/"seal":"sha256:[0-9a-f]*",//' artifact.json | sha256sum""", artifact.path)
    assert artifact.digest == f"sha256:{seal.split()[0]}"
    shell(
        """jq -r '.capsule.units[].files[]|"\\(.sha256[7:])  \\(.path)"' artifact.json | sha256sum -c --quiet""",
        artifact.path,
    )
    shell(
        """jq -r '.weights.workers[]|.residual,.native_manifest|"\\(.sha256[7:])  \\(.path)"' artifact.json"""
        " | sha256sum -c --quiet",
        artifact.path,
    )
    shell(
        """jq -r '.files|to_entries[]|"\\(.value.sha256[7:])  \\(.key)"' evidence.json | sha256sum -c --quiet""",
        artifact.path,
    )


def test_coverage_and_a_pack_are_checked_by_hand(made) -> None:
    artifact, store = made
    weights = artifact.path / "weights/0"
    total = shell("jq '[.model_extents,.residual_extents]|add|map(.size)|add' native-manifest.json", weights)
    assert total == shell("jq '.allocations|map(.size)|add' native-manifest.json", weights)

    shell('for pack in *.pack; do echo "${pack%.pack}  $pack"; done | sha256sum -c --quiet', store.directory)
    shell(
        """for record in *.coldsnap-validation.json; do jq -r '"\\(.expected.sha256[7:])  \\(.blob)"' $record; done"""
        " | sha256sum -c --quiet",
        store.directory,
    )
    line = shell("jq -r '.model_extents[3]|\"\\(.pack_offset) \\(.size) \\(.sha256)\"' native-manifest.json", weights)
    offset, size, digest = line.split()
    by_hand = shell(f"tail -c +{int(offset) + 1} *.pack | head -c {size} | sha256sum || true", store.directory)
    assert digest == f"sha256:{by_hand.split()[0]}"


def test_an_overlay_key_is_made_by_hand(made, tmp_path: Path) -> None:
    artifact, _ = made
    overlays = Overlays(tmp_path / "overlays")
    overlays.add(artifact, TARGET, recapture(artifact))

    directory = overlays.directory(artifact, TARGET)
    assert directory.name == shell("jq -jcSa .target overlay.json | sha256sum | cut -c1-24", directory).strip()
