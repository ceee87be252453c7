"""Refused by name before anything starts; what goes wrong after the start is bounded and cleaned up."""

import json
import os
import shutil
import socket
import time
from contextlib import closing

import pytest
from attrs import evolve
from lab import Background, ask, changed, port_is_free, tagged, unused_port

import coldsnap as cs
from coldsnap.errors import (
    AcceptanceError,
    AdmissionError,
    ArtifactError,
    CompatibilityError,
    EngineError,
    FormatError,
    IntegrityError,
)
from coldsnap.testing.faults import FaultPlan

pytestmark = pytest.mark.criu


@pytest.fixture
def refused(lab):
    """Run something that must be refused before anything starts; return the error."""

    def run(error, match, call):
        with pytest.raises(error, match=match) as failed:
            call()
        report = failed.value.report
        assert report.workload == "nothing was started"
        assert not [receipt.step for receipt in report.receipts if receipt.step in {"launch", "keeper", "attach"}]
        assert not tagged(lab.tag)
        assert not [run_dir for run_dir in lab.run_dirs if run_dir.exists()]
        print(f" {report.timeline.seconds:.2f} s: {failed.value}")
        return failed.value

    return run


# -- before anything starts --------------------------------------------------------------------------------------------


def test_an_environment_without_coldsnap_is_refused(lab, refused, tmp_path):
    import venv

    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")

    refused(AdmissionError, "has no coldsnap", lambda: lab.launch(evolve(lab.engine(), python=python)))


def test_an_environment_with_another_coldsnap_is_refused(lab, refused, tmp_path):
    other = tmp_path / "coldsnap"
    other.mkdir()
    (other / "__init__.py").write_text("changed = True\n")

    spec = lab.engine(env={"PYTHONPATH": str(tmp_path)})

    refused(AdmissionError, "another coldsnap|no coldsnap", lambda: lab.launch(spec))


def test_an_interpreter_that_is_not_there_is_refused(lab, refused):
    spec = evolve(lab.engine(), python="/nowhere/bin/python")

    refused(AdmissionError, "/nowhere/bin/python cannot be started", lambda: lab.launch(spec))


def test_a_model_that_is_not_there_is_refused_before_an_interpreter_is_started(lab, refused, tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    python.chmod(0o755)

    refused(
        AdmissionError,
        "the model directory .*/nowhere does not exist",
        lambda: lab.launch(cs.VLLM(tmp_path / "nowhere", python=str(python))),
    )

    assert not (tmp_path / "started").exists()


def test_a_run_directory_too_long_for_the_sockets_of_its_ranks_is_refused_in_the_hosts_namespaces(lab, criu, tmp_path):
    placement = cs.local(port=unused_port(), run_dir=tmp_path / ("r" * 90))
    policy = cs.Policy(process=cs.policy.Process(namespace="host"))
    plan = cs.resolve(policy, cs.Launch(lab.engine(), placement=placement), cs.probe(criu=criu))

    with pytest.raises(AdmissionError, match="too long for process.namespace = 'host'.*at most [0-9]+ bytes"):
        cs.execute(plan)

    assert not os.path.exists(placement.run_dir)


@pytest.mark.vllm
def test_a_model_directory_that_is_missing_is_refused(lab, refused):
    spec = cs.VLLM("/nowhere/model", python=lab.python)

    refused(AdmissionError, "/nowhere/model", lambda: lab.launch(spec))


def test_a_port_that_was_taken_meanwhile_is_refused(lab, refused):
    placement = lab.placement()
    plan = cs.resolve(cs.Policy(), cs.Launch(lab.engine(), placement=placement), lab.facts)
    with closing(socket.create_server(("127.0.0.1", placement.front.port))):
        refused(AdmissionError, f"{placement.front.port} cannot be bound", lambda: cs.execute(plan))


def test_a_port_in_use_is_refused_while_resolving(lab, criu):
    placement = lab.placement()
    with closing(socket.create_server(("127.0.0.1", placement.front.port))):
        now = cs.probe(criu=criu)
        with pytest.raises(AdmissionError, match=f"port {placement.front.port} is in use"):
            cs.resolve(cs.Policy(), cs.Launch(lab.engine(), placement=placement), now)


def test_an_output_that_exists_is_refused(lab, refused, artifact):
    call = lambda: lab.capture(lab.engine(), output=artifact.path)  # noqa: E731

    refused(ArtifactError, "exist", call)

    assert cs.Artifact.open(artifact.path).digest == artifact.digest


def test_facts_of_another_boot_are_refused(lab, refused):
    host = evolve(lab.facts.host("local"), boot_id="another")
    plan = cs.resolve(cs.Policy(), cs.Launch(lab.engine(), placement=lab.placement()), cs.Facts(hosts={"local": host}))

    refused(AdmissionError, "booted since its facts were probed", lambda: cs.execute(plan))


def test_another_criu_than_the_plan_s_is_refused(lab, refused):
    host = lab.facts.host("local")
    host = evolve(host, criu=evolve(host.criu, build_digest="sha256:" + "00" * 32))
    plan = cs.resolve(cs.Policy(), cs.Launch(lab.engine(), placement=lab.placement()), cs.Facts(hosts={"local": host}))

    refused(AdmissionError, "another build than the plan's", lambda: cs.execute(plan))


def test_an_artifact_that_was_replaced_since_it_was_resolved_is_refused(lab, refused, copied):
    plan = lab.plan_restore(copied)
    changed(copied, capture_id="another-capture-0001")

    refused(AdmissionError, "is not the artifact of the plan", lambda: cs.execute(plan))


def test_an_artifact_that_is_gone_is_refused(lab, refused, copied):
    plan = lab.plan_restore(copied)
    shutil.rmtree(copied.path)

    refused(ArtifactError, "there is no artifact", lambda: cs.execute(plan))


def largest(artifact):
    file = max(artifact.descriptor.files, key=lambda file: file.bytes)
    return artifact.path / file.path


def test_a_truncated_artifact_is_refused(lab, refused, copied):
    os.truncate(largest(copied), 4096)

    error = refused(IntegrityError, "not whole", lambda: lab.restore(copied))

    assert error.actual == "4096 bytes"


def test_a_file_that_is_missing_is_refused(lab, refused, copied):
    largest(copied).unlink()

    refused(IntegrityError, "not whole", lambda: lab.restore(copied))


def test_a_descriptor_that_was_edited_is_refused_when_it_is_opened(copied):
    path = copied.path / "artifact.json"
    path.write_bytes(path.read_bytes().replace(b'"max_tokens":16', b'"max_tokens":15'))

    with pytest.raises((FormatError, IntegrityError)):
        cs.Artifact.open(copied.path)


@pytest.mark.parametrize(
    ("field", "change", "match"),
    [
        ("version", "99.0", "reference version: captured 99.0"),
        ("torch", "1.0", "torch version: captured 1.0"),
        ("plugin_abi", 99, "plugin_abi: captured 99"),
        ("directive_format", 99, "directive_format: captured 99"),
        ("coldsnap", "9.9", "coldsnap version in the engine's environment: captured 9.9"),
    ],
)
def test_an_artifact_of_another_engine_is_refused(lab, refused, copied, field, change, match):
    other = changed(copied, engine=evolve(copied.descriptor.engine, **{field: change}))

    refused(CompatibilityError, match, lambda: lab.restore(other))


def test_distributions_that_changed_since_the_capture_are_refused_by_name(lab, refused, copied):
    path = copied.path / "capsule" / "unit-0" / "engine.json"
    record = json.loads(path.read_text())
    site = next(site for site in record["environment"]["sites"] if site["distributions"])
    gone = site["distributions"].pop()
    path.write_text(json.dumps(record, sort_keys=True, separators=(",", ":")))
    other = resealed(copied, path)

    error = refused(CompatibilityError, "is not what was captured", lambda: lab.restore(other))

    assert any(f"{gone} is new in" in mismatch for mismatch in error.mismatches)


def resealed(artifact, path):
    """Let the descriptor vouch for a file that was changed."""
    from coldsnap.artifact.evidence import hash_file

    (unit,) = artifact.descriptor.capsule.units
    with path.open("rb") as stream:
        status = os.fstat(stream.fileno())
        sha256 = hash_file(stream.fileno(), status, str(path))
    relative = str(path.relative_to(artifact.path))
    files = tuple(
        evolve(file, bytes=status.st_size, sha256=sha256) if file.path == relative else file for file in unit.files
    )
    return changed(artifact, capsule=evolve(artifact.descriptor.capsule, units=(evolve(unit, files=files),)))


def test_a_handle_of_private_namespaces_is_refused_under_a_policy_of_the_host_s(lab):
    engine = lab.launch()

    with pytest.raises(AdmissionError, match='set process.namespace = "private"'):
        lab.capture(engine, policy={"process.namespace": "host"})

    assert ask(engine)


def test_a_handle_with_secrets_in_its_environment_is_refused_without_their_values(lab):
    allow = {"process.secrets": "allow"}
    engine = lab.launch(lab.engine(env={"MY_API_KEY": "the-value"}), policy=allow)

    with pytest.raises(AdmissionError, match="MY_API_KEY") as refusal:
        lab.capture(engine)

    assert "the-value" not in str(refusal.value)
    report = lab.capture(engine, policy=allow)
    written = (report.artifact / "artifact.json").read_text()
    assert "the-value" not in written
    assert "MY_API_KEY" in written


# -- after the start ---------------------------------------------------------------------------------------------------


def flip(path, *, keep_mtime=False):
    status = path.stat()
    with path.open("r+b") as stream:
        stream.seek(status.st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))
    if keep_mtime:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("verify", ["evidence", "full"])
def test_a_flipped_bit_is_never_accepted(lab, copied, verify):
    flip(largest(copied))

    with pytest.raises(IntegrityError, match="wrong content|expected sha256") as failed:
        lab.restore(copied, policy={"weights.verify": verify})

    assert failed.value.path.endswith(largest(copied).name)
    assert failed.value.report.engine is None
    assert not [run_dir for run_dir in lab.run_dirs if run_dir.exists()]


def test_a_bit_flipped_behind_the_back_of_its_evidence_is_found_by_a_full_verification(lab, copied):
    copied.verify("evidence")  # a copy has no evidence of its own until it was read once
    flip(largest(copied), keep_mtime=True)

    with pytest.raises(IntegrityError):
        lab.restore(copied, policy={"weights.verify": "full"})


def test_another_answer_after_the_restore_is_refused(lab, copied):
    captured = copied.descriptor.acceptance
    other = changed(copied, acceptance=evolve(captured, token_ids=(*captured.token_ids[:-1], 255)))
    port = lab.placement().front.port

    with pytest.raises(AcceptanceError, match="does not answer as it did at capture") as failed:
        lab.restore(other, port=port)

    assert failed.value.step == "answer"
    assert str(list(captured.token_ids)[0]) in failed.value.actual
    assert failed.value.report.workload.startswith("nothing is left running")
    assert not tagged(lab.tag)
    assert port_is_free(port)


def test_an_engine_that_never_gets_ready_is_ended_with_the_tail_of_its_log(lab):
    began = time.monotonic()
    spec = lab.engine(args=("--weights-bytes", "notanumber"))

    with pytest.raises(EngineError, match="notanumber") as failed:
        lab.launch(spec)

    assert failed.value.step == "ready"
    assert "invalid int value" in failed.value.log_tail
    assert failed.value.report.workload.startswith("nothing is left running")
    assert time.monotonic() - began < 60
    assert not tagged(lab.tag)


def test_an_engine_that_is_not_ready_in_time_is_ended(lab):
    operation = cs.Launch(lab.engine(), placement=lab.placement(), ready_timeout_s=0.05)

    with pytest.raises(EngineError, match=r"not ready at .* within 0.05 s") as failed:
        lab.run(operation)

    assert failed.value.report.workload.startswith("nothing is left running")
    assert not tagged(lab.tag)


def test_an_engine_that_dies_while_it_starts_is_noticed_at_once(lab):
    with pytest.raises(EngineError, match="exit status 3") as failed:
        lab.launch(lab.engine(args=("--exit-after-s", "0.3")))

    assert failed.value.step == "ready"
    assert not tagged(lab.tag)


def test_an_engine_that_cannot_be_run_is_refused_with_its_command(lab):
    engine = lab.engine(cwd="/nowhere")

    with pytest.raises((EngineError, AdmissionError), match="/nowhere"):
        lab.launch(engine)

    assert not tagged(lab.tag)


def test_an_engine_whose_answers_vary_is_not_captured(lab):
    output = lab.output()
    spec = lab.engine(args=("--noise",))

    with pytest.raises(EngineError, match="two answers to one greedy request") as failed:
        lab.capture(spec, output=output)

    assert failed.value.step == "answer"
    assert not output.exists()
    assert not tagged(lab.tag)


def test_requests_that_do_not_end_in_time_leave_the_engine_serving(lab):
    engine = lab.launch()
    slow = Background(lambda: ask(engine, "slow", tokens=40, delay_s=0.1, timeout_s=60))
    time.sleep(0.3)

    with pytest.raises(EngineError, match="in use by 1 requests"):
        lab.run(cs.Capture(engine, output=lab.output(), quiesce_timeout_s=0.2))

    assert len(slow.result(60)) == 40
    assert ask(engine)


def test_a_rank_that_cannot_tidy_fails_the_capture_and_leaves_the_engine_serving(lab):
    engine = lab.launch(lab.engine(args=("--untidy",)))
    output = lab.output()

    with pytest.raises(
        EngineError, match=r"tidy was not done by every rank: api\.\d+: this engine gives nothing"
    ) as failed:
        lab.capture(engine, output=output)

    assert failed.value.step == "quiesce"
    assert not output.exists()
    assert ask(engine)


def test_requests_that_end_in_time_are_waited_for(lab):
    engine = lab.launch()
    slow = Background(lambda: ask(engine, "slow", tokens=20, delay_s=0.1, timeout_s=60))
    time.sleep(0.3)

    report = lab.capture(engine, then="keep")

    assert report.state == "succeeded"
    assert len(slow.result(60)) == 20
    (quiesced,) = (receipt for receipt in report.receipts if receipt.step == "quiesce")
    told = [name for name in quiesced.details if name.endswith(" freed_bytes")]
    assert sorted(name.partition(".")[0] for name in told) == ["api", "worker"]


def test_a_client_that_is_connected_while_the_tree_is_dumped_is_named_and_answered_afterwards(lab):
    engine = lab.launch()
    waiting = []

    def send(step, when, *, keeper_pid):
        if (step, when) == ("dump", "before"):
            waiting.append(Background(lambda: ask(engine, "held", timeout_s=60)))
            time.sleep(0.3)

    expected = ask(engine, "held")
    with pytest.raises(AdmissionError, match=r"TCP connection .*, outside the tree \(held by process .*\); close it"):
        lab.capture(engine, then="keep", fault_point=send)

    assert waiting[0].result(60) == expected


def test_a_capture_that_fails_at_its_last_moment_leaves_a_handle_serving(lab):
    engine = lab.launch()
    expected, output = ask(engine), lab.output()

    with pytest.raises(cs.ColdSnapError) as failed:
        lab.capture(engine, output=output, fault_point=FaultPlan.parse("commit:before:raise"))

    assert "running as before" in failed.value.report.workload
    assert ask(engine) == expected
    assert not output.exists()
