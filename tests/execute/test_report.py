"""What is told: reports, receipts, timelines, events, and errors that carry all of them."""

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import threading

import pytest
from lab import Background, port_is_free, tagged, until

import coldsnap as cs
from coldsnap.errors import EngineError
from coldsnap.testing.faults import FaultPlan, InjectedError

pytestmark = pytest.mark.criu


def test_a_report_has_one_receipt_and_one_span_for_each_step(captured):
    report = captured.report
    ids = [step.id for step in report.plan]

    assert report.state == "succeeded"
    assert sorted(receipt.step for receipt in report.receipts) == sorted(ids)
    assert sorted(span.name for span in report.timeline.spans) == sorted(ids)
    assert all(span.status == "ok" for span in report.timeline.spans)


def test_every_step_began_after_those_that_it_waits_for(captured):
    spans = {span.name: span for span in captured.report.timeline.spans}

    for step in captured.report.plan:
        for earlier in step.after:
            assert spans[earlier].end_ns <= spans[step.id].start_ns


def test_receipts_of_a_capture_say_what_was_found_and_written(captured, artifact):
    report = captured.report

    assert "CRIU 4." in report.receipt("admit-host").effective
    assert "reference" in report.receipt("admit-engine").effective
    assert report.receipt("answer").details["first_token_s"] > 0
    assert report.receipt("dump").bytes > 1 << 20
    assert report.receipt("seal").bytes == sum(artifact.size_bytes.values())
    assert report.receipt("commit").effective == artifact.digest[:19]
    assert report.artifact == artifact.path
    with pytest.raises(KeyError):
        report.receipt("nothing")


def test_an_artifact_names_the_plan_that_made_it(captured, artifact):
    assert artifact.descriptor.plan_digest == captured.report.plan.digest


def test_a_restore_tells_when_its_first_correct_token_came(lab, artifact):
    report = lab.restore(artifact)

    assert 0 < report.answer_s < report.timeline.seconds + 1
    assert report.answer_s >= report.timeline.between("thaw")
    assert report.receipt("verify").requested == "evidence"
    assert "tokens as captured" in report.receipt("answer").effective


def test_a_report_is_shown_as_text_as_html_and_as_json(captured):
    report = captured.report
    data = json.loads(report.to_json())

    assert str(report).startswith("capture succeeded in ")
    assert "dump" in str(report.timeline)
    assert "<table" in report._repr_html_()
    assert data["plan_digest"] == report.plan.digest
    assert data["state"] == "succeeded"
    assert data["artifact"] == str(report.artifact)
    assert [row["step"] for row in data["receipts"]] == [receipt.step for receipt in report.receipts]


def test_an_earlier_report_prices_the_next_plan(captured):
    seconds = captured.report.receipt("dump").seconds

    assert f"{seconds:.2f} s" in captured.report.plan.explain(earlier=captured.report)


def test_events_come_in_order_from_the_plan_to_its_end(captured):
    events = captured.events
    ids = [step.id for step in captured.report.plan]

    assert (events[0].kind, events[0].total) == ("plan", len(ids))
    assert (events[-1].kind, events[-1].status) == ("done", "ok")
    assert [event.at_ns for event in events] == sorted(event.at_ns for event in events)
    for number, step in enumerate(ids, 1):
        start, end = [event for event in events if event.step == step]
        assert (start.kind, end.kind) == ("start", "end")
        assert (end.number, end.total) == (number, len(ids))


def test_progress_prints_a_line_for_each_step(captured):
    file = io.StringIO()
    show = cs.progress(file=file)
    for event in captured.events:
        show(event)

    lines = file.getvalue().splitlines()
    assert len(lines) == len(captured.report.plan.steps)
    assert all(" ok " in line for line in lines)
    assert any("processes, left stopped" in line for line in lines)


def test_a_sink_that_raises_fails_nothing(lab, artifact):
    def broken(event):
        raise RuntimeError("a display that is gone")

    assert lab.restore(artifact, on_event=broken).state == "succeeded"


def test_an_error_carries_the_report_with_everything_until_then(lab, artifact):
    events = []

    with pytest.raises(InjectedError) as failed:
        lab.restore(artifact, fault_point=FaultPlan.parse("reconnect:before:raise"), on_event=events.append)

    error, report = failed.value, failed.value.report
    assert error.step == "reconnect"
    assert report.state == "failed"
    assert report.engine is None
    assert report.workload == "nothing is left running (killed the tree)"
    assert error.__notes__ == [report.workload]
    assert {span.name: span.status for span in report.timeline.spans}["reconnect"] == "error"
    assert "thaw" in [receipt.step for receipt in report.receipts]
    assert "restore failed in" in str(report)
    assert (events[-1].kind, events[-1].status, events[-1].text) == ("done", "error", report.workload)


def test_an_error_with_its_report_crosses_a_process_boundary(lab, artifact):
    with pytest.raises(InjectedError) as failed:
        lab.restore(artifact, fault_point=FaultPlan.parse("stage:before:raise"))

    again = pickle.loads(pickle.dumps(failed.value))

    assert str(again) == str(failed.value)
    assert again.report.workload == failed.value.report.workload
    assert again.report.timeline.spans == failed.value.report.timeline.spans


def test_an_interrupt_in_a_step_undoes_the_operation(lab, artifact):
    with pytest.raises(KeyboardInterrupt) as interrupted:
        lab.restore(artifact, fault_point=FaultPlan.parse("reconnect:before:interrupt"))

    assert interrupted.value.report.workload.startswith("nothing is left running")


def test_control_c_ends_a_wait_for_an_engine_at_once(lab):
    placement = lab.placement()
    script = (
        "import signal, sys, coldsnap as cs\n"
        "from coldsnap.testing.reference import ReferenceEngine\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell start deaf\n"
        "python, port, run_dir, tag, facts = sys.argv[1:]\n"
        "engine = ReferenceEngine(python=python, env={'TEST_TAG': tag})\n"
        "plan = cs.resolve(cs.Policy(), cs.Launch(engine, placement=cs.local(port=int(port), run_dir=run_dir)),\n"
        "                  cs.Facts.load(facts))\n"
        "def say(event):\n"
        "    print(event.kind, event.step, flush=True)\n"
        "try:\n"
        "    cs.execute(plan, on_event=say)\n"
        "except KeyboardInterrupt as error:\n"
        "    print('interrupted:', error.report.workload, flush=True)\n"
    )
    lab.facts.save(lab.directory / "facts.json")
    (run_dir,) = lab.run_dirs
    arguments = [lab.python, str(placement.front.port), str(run_dir), lab.tag, str(lab.directory / "facts.json")]
    with subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True) as caller:
        while caller.stdout.readline().strip() != "start ready":
            assert caller.poll() is None
        caller.send_signal(signal.SIGINT)
        told, _ = caller.communicate(timeout=30)

    assert told.splitlines()[-1] == "interrupted: nothing is left running (killed the tree)"
    assert not tagged(lab.tag)
    assert not run_dir.exists()
    assert port_is_free(placement.front.port)


def test_an_engine_that_dies_between_two_operations_tells_how(lab):
    engine = lab.launch()
    os.kill(tagged(lab.tag)[0], signal.SIGKILL)
    until(lambda: engine.status().state in {"exited", "gone"}, "the engine's end")

    with pytest.raises(EngineError, match="is no more"):
        lab.capture(engine)


def test_two_captures_of_one_engine_at_once_are_refused_by_name(lab):
    engine = lab.launch()
    reached, go_on = threading.Event(), threading.Event()

    def hold(step, when, *, keeper_pid):
        if (step, when) == ("quiesce", "before"):
            reached.set()
            go_on.wait(30)

    first = Background(lambda: lab.capture(engine, output=lab.directory / "one", then="keep", fault_point=hold))
    assert reached.wait(30)
    second = cs.Engine.attach(engine.run_dir)
    try:
        with pytest.raises(cs.ColdSnapError, match="capture is in flight"):
            lab.capture(second, output=lab.directory / "two")
    finally:
        go_on.set()
        second.detach()

    assert first.result(60).state == "succeeded"
