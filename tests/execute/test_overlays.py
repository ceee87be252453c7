"""An overlay of a portable template: captured on its target with everything imported, chosen there and nowhere else."""

import shutil

import pytest
from attrs import evolve
from lab import ask, tagged

import coldsnap as cs
from coldsnap.artifact.overlay import Overlays
from coldsnap.describe import overlay_target
from coldsnap.errors import IntegrityError
from coldsnap.testing.checkpoint import write_checkpoint

pytestmark = pytest.mark.criu

N580 = {"compatibility.driver": "n580"}


def test_an_overlay_shares_the_packs_and_is_chosen_on_its_exact_target_alone(lab, tmp_path):
    engine = lab.engine(weights=str(write_checkpoint(tmp_path / "weights.safetensors", seed=5)), args=("--fork",))
    portable = cs.Artifact.open(lab.capture(engine, policy=N580).artifact)
    target = overlay_target("unit-0", lab.facts.host("local"), (), "n580", machine="this machine")
    overlays, store = Overlays(tmp_path / "overlays"), str(tmp_path / "store")

    def capture(path):
        policy = N580 | {"process.artifact_scope": "target-local"}
        return cs.Artifact.open(lab.capture(engine, policy=policy, output=path, store=store).artifact)

    assert overlays.select(portable, target).reason == "missing"
    binding = overlays.add(portable, target, capture)
    assert "images" in binding.changed

    found = overlays.select(portable, target)
    assert (found.overlay, found.reason) == (True, "matched")
    assert found.artifact.packs == portable.packs
    restored = lab.run(cs.Restore(found.artifact, placement=lab.placement(), store=store))
    assert ask(restored.engine)
    restored.engine.stop()

    (unit,) = target.units
    elsewhere = overlays.select(portable, evolve(target, units=(evolve(unit, host="another machine"),)))
    assert (elsewhere.overlay, elsewhere.reason, elsewhere.artifact) == (False, "missing", portable)

    image = next((found.artifact.path / "capsule").rglob("pages-*.img"))
    data = bytearray(image.read_bytes())
    data[len(data) // 2] ^= 1
    image.write_bytes(data)
    with pytest.raises(IntegrityError):
        lab.run(cs.Restore(overlays.select(portable, target).artifact, placement=lab.placement(), store=store))
    assert not tagged(lab.tag)
    shutil.rmtree(overlays.directory(portable, target) / "artifact")
    assert overlays.select(portable, target).reason == "missing"
