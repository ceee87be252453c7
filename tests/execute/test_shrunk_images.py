"""Compressed process images, from the policy to the answer of a restored engine."""

import json
import os
import signal
import subprocess
import sys

import pytest
from lab import ask, tagged, until, unused_port

import coldsnap as cs
from coldsnap.artifact.pageimage import read_image
from coldsnap.drivers import n610
from coldsnap.drivers.page_images import shrink_pages
from coldsnap.errors import IntegrityError
from coldsnap.keeper.client import Keeper
from coldsnap.keeper.undo import CONTINUE, KILL
from coldsnap.testing.checkpoint import write_checkpoint
from still_memory import STILL, private_memory

pytestmark = pytest.mark.criu
LZ4 = {"io.image_compression": "lz4"}
CAPTURE = """
import json, sys
import coldsnap as cs
import coldsnap.testing.reference
job = json.loads(sys.argv[1])
operation = cs.Capture(cs.Engine.attach(job["run_dir"]), output=job["output"], then="keep")
policy = cs.Policy().evolve(**{"io.image_compression": "lz4"})
cs.execute(cs.resolve(policy, operation, cs.Facts.load(job["facts"])))
"""


def receipts(report):
    return {receipt.step: receipt for receipt in report.receipts}


def blocks(artifact):
    return sorted((artifact.path / "capsule/unit-0/images").glob("*.blocks"))


def test_a_compressed_engine_answers_as_before_alone_and_beside_its_clone(lab):
    serving = lab.launch(lab.engine(loopback=True))
    expected = ask(serving)

    report = lab.capture(serving, policy=LZ4, then="keep")

    assert ask(report.engine) == expected  # it serves on
    artifact = cs.Artifact.open(report.artifact)
    clone = lab.restore(artifact).engine
    assert ask(clone) == ask(report.engine) == expected
    report.engine.stop(grace_s=0)
    second = lab.restore(artifact)
    assert ask(second.engine) == ask(clone) == expected
    pages = artifact.descriptor.capsule.units[0].pages
    assert blocks(artifact)
    assert pages.compression == "lz4"
    assert pages.stored_bytes == sum(path.stat().st_size for path in blocks(artifact))
    receipt = receipts(report)["shrink"]
    assert (receipt.requested, receipt.bytes) == ("lz4", pages.stored_bytes)
    assert {"raw_bytes", "zero_bytes", "stored_bytes", "shrink_s"} <= set(receipt.details)
    thawed = receipts(second)["thaw"].details
    assert thawed["pages_bytes"] == pages.raw_bytes - pages.zero_bytes
    assert thawed["pages_workers"] == 1


def test_a_flipped_byte_is_found_before_a_process_runs_though_its_evidence_is_intact(lab):
    artifact = cs.Artifact.open(lab.capture(lab.engine(), policy=LZ4).artifact)
    path = max(blocks(artifact), key=lambda path: path.stat().st_size)
    before = path.stat()
    with path.open("r+b") as file:
        block = next(block for block in read_image(file.fileno()).blocks() if block.length)
        file.seek(block.offset + 1)
        byte = file.read(1)
        file.seek(block.offset + 1)
        file.write(bytes([byte[0] ^ 0x10]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    with pytest.raises(IntegrityError, match=path.name) as failed:
        lab.restore(artifact)

    assert "thaw" not in receipts(failed.value.report)
    assert not tagged(lab.tag)


def test_a_caller_killed_while_it_compresses_leaves_no_artifact_and_an_engine_that_serves(lab, facts, tmp_path):
    facts.save(tmp_path / "facts.json")
    engine, output = lab.launch(lab.engine(weights_bytes=64 << 20)), lab.output()
    before = ask(engine)
    job = {"run_dir": str(engine.run_dir), "output": str(output), "facts": str(tmp_path / "facts.json")}
    caller = subprocess.Popen([sys.executable, "-c", CAPTURE, json.dumps(job)], start_new_session=True)
    try:
        until(lambda: list(tmp_path.rglob("*.blocks")), "the first compressed block")
    finally:
        caller.kill()
        caller.wait(timeout=10)

    assert caller.returncode == -signal.SIGKILL
    until(lambda: not output.exists(), "the removal of what was half done")
    assert ask(engine) == before


def test_the_memory_of_the_reference_engine_is_the_same_page_for_page(lab, criu):
    engine = lab.launch(lab.engine(env=STILL))
    capsule = lab.directory / "capsule"
    capsule.mkdir()
    with Keeper.connect(engine.run_dir) as keeper, keeper.operation("capture", [CONTINUE]):
        keeper.signal(signal.SIGSTOP, whom="tree")
        n610.dump_tree(keeper, criu, capsule, leave="stopped", timeout_s=30)
        memory = private_memory(keeper)
    engine.stop(grace_s=0)
    shrink_pages(capsule, compression="lz4")

    rebind = n610.Rebind(port=engine.endpoint.port, to_port=unused_port())
    keeper = Keeper.start(lab.placement().run_dir)
    try:
        with keeper.operation("restore", [KILL]):
            n610.thaw_tree(keeper, criu, n610.stage_tree(keeper, capsule, rebind=rebind), timeout_s=30, leave="stopped")
            restored = private_memory(keeper)
    finally:
        keeper.stop(grace_s=0)

    assert len({pid for pid, _ in memory}) == 4  # the small root, front end, worker, resource tracker
    assert restored == memory


def test_uncompressed_pages_are_told_and_restored_too(lab):
    report = lab.capture(lab.engine(), policy={"io.image_compression": "none"})
    artifact = cs.Artifact.open(report.artifact)

    assert not blocks(artifact)
    assert artifact.descriptor.capsule.units[0].pages.compression == "none"
    assert "pages_s" not in receipts(lab.restore(artifact))["thaw"].details


def test_weights_outside_a_compressed_image_come_back(lab):
    checkpoint = write_checkpoint(lab.directory / "model.safetensors", size_bytes=16 << 20)
    report = lab.capture(lab.engine(weights=str(checkpoint)), policy=LZ4, then="keep")
    expected = ask(report.engine)

    artifact = cs.Artifact.open(report.artifact)

    assert artifact.descriptor.weights.kind == "packs"
    assert blocks(artifact)
    assert ask(lab.restore(artifact).engine) == expected


def test_weights_that_stayed_are_found_before_compression_hides_them(lab):
    checkpoint = write_checkpoint(lab.directory / "model.safetensors", size_bytes=16 << 20)
    engine = lab.launch(lab.engine(weights=str(checkpoint), args=("--hoard",)))

    with pytest.raises(IntegrityError, match="weights of worker-0 are still in the process image"):
        lab.capture(engine, policy=LZ4, then="keep")

    assert ask(engine)
