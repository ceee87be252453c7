"""The doctor at work: a capture of a running engine asks it before anything is brought to rest."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
from lab import ask, tagged

import coldsnap as cs
from coldsnap.errors import AdmissionError

pytestmark = pytest.mark.criu


@contextmanager
def intruder(lab, code, **env):
    """Run something inside the namespaces of the lab's engine, as an attached tool does."""
    code += "\nprint('ready', flush=True)\ntime.sleep(60)"
    command = ["nsenter", "--target", str(min(tagged(lab.tag))), "--pid", "--mount", "--ipc"]
    process = subprocess.Popen(
        [*command, sys.executable, "-c", f"import os, time\n{code}"],
        env={"PATH": os.environ["PATH"], **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        yield
    finally:
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, timeout=10)
        for pid in children.stdout.split():
            os.kill(int(pid), 9)
        process.kill()
        process.communicate()


def test_a_running_engine_with_an_obstacle_is_refused_with_all_of_them_before_it_is_brought_to_rest(lab):
    engine = lab.launch()
    with intruder(lab, "f = os.openpty()", HF_TOKEN="hush-hush"), pytest.raises(AdmissionError) as refused:
        lab.capture(engine)

    steps = [receipt.step for receipt in refused.value.report.receipts]
    assert "quiesce" not in steps
    said = "\n".join(refused.value.mismatches)
    assert "a terminal; start the engine with stdin from /dev/null" in said
    assert "its session 0 began outside the tree" in said
    assert "environment names that look secret: HF_TOKEN" in said
    assert "hush-hush" not in str(refused.value)
    assert ask(engine)
    assert engine.status().operation is None
    assert not list(lab.directory.glob("artifact*"))


def test_a_secret_name_of_any_process_is_allowed_where_the_policy_allows_it_and_told_in_the_receipts(lab):
    spec = lab.engine(env={"SERVICE_PASSWORD": "hush-hush"})
    allowed = {"process.secrets": "allow"}
    engine = lab.run(cs.Launch(spec, placement=lab.placement()), allowed).engine
    report = lab.capture(engine, policy=allowed, then="keep")

    for step in ("attach", "quiesce"):
        (details,) = (receipt.details for receipt in report.receipts if receipt.step == step)
        assert any("look secret: SERVICE_PASSWORD" in str(text) for text in details.values())
        assert any(name.startswith("note ") for name in details)
    assert "hush-hush" not in str(report)


def test_the_doctor_finds_nothing_in_an_engine_that_this_library_launched(lab):
    engine = lab.launch()
    diagnosis = cs.diagnose(min(tagged(lab.tag)), criu=lab.criu)

    assert diagnosis.launched
    assert all(found.severity == "note" and not found.pid for found in diagnosis.findings)  # of the machine, perhaps
    assert "was launched by ColdSnap: capture it with Capture(Engine.attach(NAME)" in diagnosis.first_step
    assert ask(engine)


def test_the_doctor_of_a_keeper_names_its_engine(lab):
    engine = lab.launch()
    told = json.loads((engine.run_dir / "keeper.json").read_text())
    for keeper in (told["keeper"]["pid"], told["guard"]["pid"]):
        with pytest.raises(AdmissionError, match=f"process {keeper} keeps an engine, .* name [0-9]+ ") as refused:
            cs.diagnose(keeper, criu=lab.criu)

        named = int(str(refused.value).split("name ")[1].split()[0])
        assert cs.diagnose(named, criu=lab.criu).launched
    assert ask(engine)
