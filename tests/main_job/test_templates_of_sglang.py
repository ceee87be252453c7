"""A template of real SGLang: captured once, started out of its pack, with the checkpoint away, the same tokens.

One rank is started twice at once; with COLDSNAP_TEST_FULL, one and two ranks three times each.
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
def test_a_template_is_started_out_of_its_pack_and_answers_as_captured(
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
    taken.rename(tmp_path / "moved-away")

    reports = at_once(run, artifact, ports[1:])
    reports += at_once(run, artifact, ports[:1]) if FULL else []

    for report, answered, status in reports:
        assert answered == expected
        assert status == 200
        details = report.receipt("report").details
        assert details["pack_bytes"] == sum(pack.bytes for pack in packs)
        assert report.receipt("answer").effective.endswith("tokens as captured")


def at_once(run, artifact, ports):
    """Restore at several ports at the same time; return each report with what was said, and how ready the server is."""
    with ThreadPoolExecutor(len(ports)) as pool, ExitStack() as serving:
        operations = [cs.Restore(artifact, placement=cs.local(port=port)) for port in ports]
        reports = list(pool.map(run, operations))
        engines = [serving.enter_context(report.serving) for report in reports]
        return [(report, said(one), get(one, "/ready")) for report, one in zip(reports, engines, strict=True)]
