"""A template of real SGLang: captured once, started out of its pack and out of the checkpoint, the same tokens.

One rank is started twice at once, once by each; with COLDSNAP_TEST_FULL, one and two ranks are started three times by
each, out of the pack with the checkpoint away.
"""

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

import coldsnap as cs

sys.path.insert(0, str(Path(__file__).parent))
from test_sglang import ARGS, get, model, run, said

__all__ = ["model", "run"]  # fixtures

pytestmark = [pytest.mark.sglang, pytest.mark.criu, pytest.mark.slow, pytest.mark.timeout(1800)]

FULL = "COLDSNAP_TEST_FULL" in os.environ
TEMPLATE = {"compatibility.driver": "n580"}


@pytest.mark.parametrize("ranks", [1, 2] if FULL else [1])
def test_a_template_is_started_out_of_its_pack_and_out_of_the_checkpoint_and_answers_as_captured(
    ranks, model, sglang_python, tmp_path, free_ports, run
):
    ports, taken = free_ports(3), tmp_path / "model"
    shutil.copytree(model, taken)
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * ranks)}
    spec = cs.SGLang(taken, args=(*ARGS, "--tp", str(ranks)), python=sglang_python, env=env)

    operation = cs.Capture(spec, output=tmp_path / "artifact", placement=cs.local(port=ports[0]), then="keep")
    captured = run(operation, **TEMPLATE)
    with captured.serving as original:
        expected = said(original)
    artifact = cs.Artifact.open(tmp_path / "artifact")
    packs = artifact.descriptor.weights.payloads.objects
    assert captured.receipt("prove").reason == "no device, no library of a driver"
    assert len(packs) == ranks
    whole = sum(pack.bytes for pack in packs)

    as_captured(run, artifact, ports[1:], ("native", "recovery"), expected, whole)
    if FULL:
        as_captured(run, artifact, ports[1:], ("recovery", "recovery"), expected, whole)
        taken.rename(tmp_path / "moved-away")
        as_captured(run, artifact, ports[1:], ("native", "native"), expected, whole)


def as_captured(run, artifact, ports, providers, expected, whole):
    """Restore at several ports at the same time, each by its provider, and hold all of them against what was said."""

    def restored(port, provider):
        return run(cs.Restore(artifact, placement=cs.local(port=port)), **{"weights.mode": provider})

    with ThreadPoolExecutor(len(ports)) as pool, ExitStack() as serving:
        reports = list(pool.map(restored, ports, providers))
        engines = [serving.enter_context(report.serving) for report in reports]
        for report, engine, provider in zip(reports, engines, providers, strict=True):
            assert said(engine) == expected
            assert get(engine, "/ready") == 200
            details = report.receipt("report").details
            assert details["pack_bytes"] == (whole if provider == "native" else 0)
            assert (details["checkpoint_bytes"] > 1 << 20) == (provider == "recovery")
            assert report.receipt("answer").effective.endswith("tokens as captured")
