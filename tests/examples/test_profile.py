"""The profile of a restore: CRIU's log in phases, and every process with its counts."""

import json

import pytest

LOG = """\
(00.000000) CRIU run id = 1
(00.000420) File /run/criu.kdat does not exist
(00.097416) Reading image tree
(00.170525)    601: Restore via sigreturn
task_args->pid: 603
(00.176564) pie: 603: Switched to the restorer 603
(00.224822) pie: 603: `- returned 4096
(02.303691) pie: 603: `- returned 691728384
(02.324608) pie: 601: Switched to the restorer 601
(02.417900) pie: 601: `- returned 17915904
(02.462531) Running post-resume scripts
"""


def test_the_phases_of_criu_are_read_from_its_log(example):
    found = example("profile_restore").criu_phases(LOG.splitlines())

    assert [(one.name, one.start_s, round(one.seconds, 6), one.bytes) for one in found] == [
        ("asking the kernel what it can", 0.0, 0.097416, 0),
        ("images, files, processes", 0.097416, 0.079148, 0),
        ("memory of 601", 2.324608, 0.093292, 17915904),
        ("memory of 603", 0.176564, 2.127127, 691732480),
        ("the rest: threads, registers, timers", 2.4179, 0.044631, 0),
    ]


def test_a_log_that_ends_early_has_no_phase_below_zero(example):
    assert all(one.seconds >= 0 for one in example("profile_restore").criu_phases(LOG.splitlines()[:4]))


@pytest.mark.criu
def test_a_profile_names_every_step_and_process_and_leaves_nothing_running(
    tmp_path, example, artifact, criu, free_port, engine_name, capsys
):
    figures = tmp_path / "figures.json"
    arguments = [str(artifact), "--criu", criu, "--port", str(free_port), "--name", engine_name]

    assert example("profile_restore").main([*arguments, "--json", str(figures)]) == 0

    found = json.loads(figures.read_text())
    assert {"keeper", "stage", "thaw", "reconnect", "answer"} <= set(found["steps_s"])
    assert len(found["processes"]) >= 2
    assert all(one["faults"] >= one["image_bytes"] // (2 << 20) > 0 for one in found["processes"])
    assert {f"memory of {one['pid']}" for one in found["processes"]} <= {one["name"] for one in found["criu"]}
    assert "transparent huge pages" in capsys.readouterr().out
