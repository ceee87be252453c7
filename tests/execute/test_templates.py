"""Templates: a process that has not begun is captured, and an engine is started around it wherever it comes back."""

import contextlib
import json
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import evolve
from lab import Lab, ask, changed, host_pid, sample, tagged, until, unused_port

import coldsnap as cs
from coldsnap.artifact import canonical
from coldsnap.engines.control import Ranks
from coldsnap.errors import AdmissionError, CompatibilityError, EngineError, StepError
from coldsnap.keeper.control import request_control
from coldsnap.testing.faults import FaultPlan

pytestmark = pytest.mark.criu

N580 = {"compatibility.driver": "n580"}
IMPORTED = {**N580, "process.artifact_scope": "target-local"}


@pytest.fixture(scope="module")
def template(tmp_path_factory, criu, engine_python, facts):
    """One artifact for every test that only restores, its port, and what the captured engine answered."""
    directory = tmp_path_factory.mktemp("template")
    lab = Lab(directory, criu, engine_python, facts)
    port = unused_port()
    engine = lab.engine(env={"NCCL_SOCKET_IFNAME": "captured0", "TZ": "Asia/Tokyo"})
    report = lab.capture(engine, policy=N580, placement=lab.placement(port=port), then="keep")
    with report.engine as kept:
        answer = ask(kept)
    yield SimpleNamespace(report=report, port=port, answer=answer, tag=lab.tag)
    lab.close()
    until(lambda: not tagged(lab.tag), "the end of every started process")
    shutil.rmtree(directory)


@pytest.fixture
def artifact(template):
    return cs.Artifact.open(template.report.artifact)


def environment(engine, role="api"):
    """Return what a rank of an engine was started with."""
    (name,) = [path.name for path in (engine.run_dir / "rank" / "control").iterdir() if path.name.startswith(role)]
    pid = host_pid(engine.run_dir, int(name.split(".")[1]))
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


def test_one_run_yields_the_template_and_the_answer_and_the_same_tree_serves(template, artifact):
    descriptor = artifact.descriptor

    assert descriptor.snapshot_driver.id == "n580"
    assert descriptor.snapshot_driver.boundary == "pre-cuda-process-template"
    assert descriptor.weights.kind == "checkpoint"
    assert len(descriptor.capsule.units[0].pids) == 1
    assert descriptor.capsule.units[0].listeners == ()
    assert len(descriptor.acceptance.token_ids) == 16
    assert template.report.receipt("prove").reason == "no device, no library of a driver"
    assert sum(artifact.size_bytes.values()) < 20e6, "nothing of the engine is in it"
    assert artifact.verify("full")


def test_five_restores_of_one_template_answer_exactly_two_of_them_at_once(lab, artifact, template):
    """On other ports, with somebody else on the captured one and on the captured pid."""
    with contextlib.ExitStack() as decoys:
        with contextlib.suppress(OSError):  # taken is taken, by whomever
            decoys.enter_context(socket.create_server(("127.0.0.1", template.port)))
        for _ in range(3):
            with lab.restore(artifact).engine as engine:
                assert engine.endpoint.port != template.port
                assert ask(engine) == template.answer
        with ThreadPoolExecutor(2) as pool:
            plans = [lab.plan_restore(artifact, address=address) for address in ("127.0.0.1", "127.0.0.2")]
            first, second = (report.engine for report in pool.map(cs.execute, plans))
    assert (first.endpoint.host, second.endpoint.host) == ("127.0.0.1", "127.0.0.2")
    assert first.endpoint.port != second.endpoint.port
    assert first.status().incarnation != second.status().incarnation
    assert ask(first) == template.answer
    pids = artifact.descriptor.capsule.units[0].pids
    started = [process.pid for process in first.keeper.tree()]
    assert started[0] == pids[0]
    assert min(started) >= pids[0], "pids of helpers are below, so that the engine could be captured once more"
    assert sample(first) != ask_at(second, temperature=1.0, tokens=24), "what nobody seeded"


def ask_at(engine, **body):
    """Ask an engine that listens at another address of this machine."""
    import urllib.request

    data = {"model": "reference", "prompt": "Hello", "max_tokens": body.pop("tokens"), **body}
    request = urllib.request.Request(
        f"{engine.endpoint.url}/v1/completions", data=json.dumps(data).encode(), headers={"Content-Type": "text/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)["choices"][0]["text"]


def test_names_of_the_network_and_the_placement_are_those_of_the_destination(lab, artifact, monkeypatch):
    for name, value in {"NCCL_IB_HCA": "mlx5_7", "UCX_NET_DEVICES": "eth9", "OMP_NUM_THREADS": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "here0")
    monkeypatch.setenv("MY_OWN", "never asked for")

    report = lab.restore(artifact)

    for role in ("api", "worker"):
        found = environment(report.engine, role)
        assert found["NCCL_SOCKET_IFNAME"] == "here0", "not the one of the capture"
        assert (found["NCCL_IB_HCA"], found["UCX_NET_DEVICES"], found["OMP_NUM_THREADS"]) == ("mlx5_7", "eth9", "3")
        assert found["TZ"] == "Asia/Tokyo", "what the specification says, it says everywhere"
        assert "MY_OWN" not in found
        assert found["COLDSNAP_RESTORE_TRANSPORT_ENVIRONMENT_PATH"].endswith("/transport.json")
    assert report.receipt("start").reason == "3 names of the network are those of here"
    assert report.receipt("stage-runtime").reason == "it is the one that restores"


def test_nobody_but_the_acceptance_request_gets_through_before_the_answer_was_compared(lab, artifact):
    asked = []

    def watch(event):
        if event.kind == "end" and event.step == "ready":
            directory = Path(lab.run_dirs[-1]) / "rank"
            asked.append(request_control(directory, "status", roles=("api",), timeout_s=5))

    report = lab.restore(artifact, on_event=watch)

    ((status,),) = [list(each.values()) for each in asked] or [[None]]
    assert status["open"] is False
    assert Ranks(report.engine.keeper.rank_dir).ping()
    assert ask(report.engine)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path, engine_python):
    """A library by the name of the CUDA driver's, which a process really maps."""
    source = next(Path("/usr/lib").rglob("libz.so.1*"), None) or next(Path("/lib").rglob("libm.so.6"))
    return shutil.copyfile(source.resolve(), tmp_path / "libcuda.so.1")


def test_a_template_that_maps_a_library_of_the_driver_is_refused_and_nothing_is_left(lab, library):
    output = lab.output()

    with pytest.raises(AdmissionError, match="not proven to be free of accelerators") as refused:
        lab.capture(lab.engine(env={"LD_PRELOAD": str(library)}), policy=N580, output=output)

    assert any("by its own account" in line and str(library) in line for line in refused.value.mismatches)
    assert not tagged(lab.tag)
    assert not output.exists()


def test_a_changed_interpreter_or_engine_file_is_refused_before_anything_starts(lab, artifact, tmp_path):
    shutil.copytree(artifact.path, tmp_path / "copy")
    copy = cs.Artifact.open(tmp_path / "copy")
    (capsule,) = copy.descriptor.capsule.units
    path = copy.path / capsule.path / "template.json"
    document = json.loads(path.read_bytes())
    for one in document["files"]:
        one["sha256"] = one["looks"] = f"sha256:{'0' * 64}"
    data = canonical.encode(document)
    path.write_bytes(data)
    files = tuple(
        evolve(file, bytes=len(data), sha256=canonical.sha256_of(data)) if file.path.endswith("template.json") else file
        for file in capsule.files
    )
    unit = evolve(capsule, files=files)
    resealed = changed(copy, capsule=evolve(copy.descriptor.capsule, units=(unit,)))

    with pytest.raises(CompatibilityError, match="would not be what was captured") as refused:
        lab.restore(resealed)

    assert len(refused.value.mismatches) == 2
    assert all("was changed since the capture" in line for line in refused.value.mismatches)
    assert not tagged(lab.tag)
    assert not lab.run_dirs[-1].exists()


def test_an_engine_that_cannot_start_at_the_destination_leaves_nothing(lab, artifact):
    port, taken = unused_port(), []

    def occupy(event):
        if event.kind == "end" and event.step == "thaw":
            taken.append(socket.create_server(("127.0.0.1", port)))

    with pytest.raises(EngineError, match="ended"):
        lab.restore(artifact, port=port, on_event=occupy)

    taken[0].close()
    assert not tagged(lab.tag)
    assert ask(lab.restore(artifact, port=port).engine), "the same again without the fault"


@pytest.mark.parametrize("fault", ["prove:before:raise", "dump:after:raise", "start:after:raise"])
def test_a_capture_that_fails_anywhere_leaves_no_process_and_no_artifact(lab, fault):
    output = lab.output()

    with pytest.raises(StepError):
        lab.capture(lab.engine(), policy=N580, output=output, fault_point=FaultPlan.parse(fault))

    assert not tagged(lab.tag)
    assert not output.exists()


def test_an_engine_that_runs_already_has_no_template(lab, facts):
    handle = SimpleNamespace(run_dir=lab.directory, labels={})

    with pytest.raises(cs.errors.UnsupportedError, match="has no template any more"):
        cs.resolve(cs.Policy().evolve(**N580), cs.Capture(handle, output=lab.output()), facts)


# -- imported ----------------------------------------------------------------------------------------------------------


def test_an_imported_template_gives_its_imports_to_the_engine_and_to_workers_that_are_forked(lab):
    report = lab.capture(lab.engine(args=("--fork",)), policy=IMPORTED)
    artifact = cs.Artifact.open(report.artifact)

    assert artifact.descriptor.compatibility.policy == "target-local-v1"
    first, second = lab.restore(artifact).engine, lab.restore(artifact).engine

    assert ask(first) == ask(second)
    for engine in (first, second):
        (inherited,) = request_control(engine.keeper.rank_dir, "inherited", roles=("worker",), timeout_s=5).values()
        assert inherited["modules"] == ["numpy", "torch"]


def test_a_worker_that_is_spawned_imports_again(lab):
    report = lab.capture(lab.engine(), policy=IMPORTED)

    engine = lab.restore(cs.Artifact.open(report.artifact)).engine

    (inherited,) = request_control(engine.keeper.rank_dir, "inherited", roles=("worker",), timeout_s=5).values()
    assert inherited["modules"] == []
