"""A plan prints, compares, serialises and has a digest; the same arguments give the same bytes."""

import json

import fleet
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.behaviour import ANY, WORKING
from coldsnap.errors import FormatError
from coldsnap.operation import Delete, Publish, Sleep, Stop, Verify, Wake
from coldsnap.plan import Barrier, Plan
from coldsnap.policy import Policy, leaves
from coldsnap.receipts import Receipt, Report
from coldsnap.resolve import resolve
from coldsnap.steps import AttachEngine, HandOver
from strategies import leaf_values

PORTS = st.integers(1024, 65535)
TIMES_S = st.one_of(st.floats(0.1, 1e6), st.integers(1, 10**6))
NAMES = st.none() | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
PROMPTS = st.text(min_size=1, max_size=40).filter(lambda text: "\0" not in text)
HOSTS = st.sampled_from([fleet.cpu_host(), fleet.gpu_host(), fleet.gpu_host("700.1")])
# Their values need others beside them, or another artifact.
BESIDE = {
    *("weights.recovery.enabled", "weights.native.materialize", "graphs.policy"),
    *("process.artifact_scope", "compatibility.driver", "weights.native.repository", "weights.native.revision"),
    *("process.cache_paths", "weights.native.files_by_worker"),
}


def working_policies():
    rows = {row.path: row for row in leaves()}
    values = {
        path: leaf_values(rows[path]) if working is ANY else st.sampled_from(working)
        for path, working in WORKING.items()
        if path not in BESIDE
    }
    values["io.hydration_backend"] = st.sampled_from(["auto", "python", "buffered", "direct"])  # gds needs more
    return st.fixed_dictionaries({}, optional=values).map(lambda changes: Policy().evolve(**changes))


@st.composite
def resolved_plans(draw):
    host, policy = draw(HOSTS), draw(working_policies()).evolve(**{"compatibility.driver": "release"})
    namespace = policy.process.namespace
    captured = fleet.captured_on
    if host.gpus and policy.weights.mode in ("native", "recovery"):
        captured = fleet.with_packs
    elif not host.gpus or policy.weights.mode == "image":
        # Nothing leaves the image there, so that nothing can be asked to.
        mode = "image" if policy.weights.mode == "image" else "auto"
        policy = policy.evolve(**{"weights.mode": mode, "process.discard": None})
    artifact = captured(host, namespace=namespace, run_dir="/run/coldsnap/tiny/rank")
    operation = draw(
        st.one_of(
            st.builds(fleet.launch, name=NAMES, ready_timeout_s=TIMES_S),
            st.builds(fleet.capture, then=st.sampled_from(["stop", "keep"]), prompt=PROMPTS, dump_timeout_s=TIMES_S),
            st.just(fleet.restore(artifact, port=draw(PORTS), thaw_timeout_s=draw(TIMES_S))),
            st.builds(lambda grace: Stop(fleet.Handle(), grace_s=grace), TIMES_S),
            st.builds(
                lambda mode: Verify(artifact, verify=mode, store="/s"), st.sampled_from(["evidence", "full", None])
            ),
            st.builds(
                lambda dry: Delete(fleet.with_packs(host), store="/s", roots=("/a", "/b"), dry_run=dry), st.booleans()
            ),
            st.builds(lambda plain: Publish(artifact, reference="registry/x:v1", insecure=plain), st.booleans()),
        )
    )
    if host.gpus and policy.weights.mode != "image" and draw(st.booleans()):
        operation = draw(st.sampled_from([Sleep(fleet.Handle()), Wake(fleet.Handle(), tags=["kv_cache"])]))
    return resolve(policy, operation, fleet.facts(host))


@given(resolved_plans())
def test_a_plan_read_back_from_json_is_the_same_plan(plan):
    again = Plan.from_json(plan.to_json())

    assert again == plan
    assert again.digest == plan.digest
    assert again.to_json() == plan.to_json()
    assert str(again) == str(plan)


@given(resolved_plans())
def test_every_step_waits_only_for_steps_before_it(plan):
    seen = set()
    for step in plan:
        assert set(step.after) <= seen
        seen.add(step.id)


def test_the_same_arguments_give_the_same_bytes(planned):
    first, second = (planned(fleet.capture()) for _ in range(2))

    assert first.to_json() == second.to_json()
    assert first.digest == second.digest


def test_a_digest_changes_with_anything_that_will_be_done(planned):
    plan = planned(fleet.capture())

    assert planned(fleet.capture(prompt="Hello")).digest != plan.digest
    assert planned(fleet.capture(), fleet.cpu_host(boot_id="another")).digest != plan.digest
    assert planned(fleet.capture(), **{"process.namespace": "host"}).digest != plan.digest


def test_a_plan_can_be_asked_for_a_step_and_a_decision(planned):
    plan = planned(fleet.capture())

    assert plan["dump"].leave == "stopped"
    assert plan.decision("weights.mode").effective == "image"
    with pytest.raises(KeyError):
        plan["nothing"]
    with pytest.raises(KeyError):
        plan.decision("nothing")


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda data: data.update(format=2), "expected format 1"),
        (lambda data: data.update(extra=1), "extra"),
        (lambda data: data.pop("driver"), "driver"),
        (lambda data: data.update(driver=3), "texts"),
        (lambda data: data["steps"][0].update(step="Unknown"), "Unknown"),
        (lambda data: data["steps"][0].update(colour="red"), "colour"),
        (lambda data: data["steps"][0].update(id=7), "id"),
        (lambda data: data["steps"][0].update(after=[7]), "after"),
        (lambda data: data["steps"][0].update(after=["later"]), "later"),
        (lambda data: data["steps"][1].update(namespace="sideways"), "sideways"),
        (lambda data: data["steps"][-1].update(then=["stop"]), "then"),
        (lambda data: step(data, "ready").update(timeout_s="60"), "timeout_s"),
        (lambda data: step(data, "ready").update(timeout_s=True), "timeout_s"),
        (lambda data: step(data, "launch").update(environment=[["NAME"]]), "environment"),
        (lambda data: step(data, "launch").update(argv="python"), "argv"),
        (lambda data: data["decisions"][0].update(reason=None), "reason"),
        (lambda data: data["steps"].append(data["steps"][0]), "twice"),
    ],
)
def test_what_is_not_exactly_a_plan_is_refused(planned, change, place):
    data = json.loads(planned(fleet.capture()).to_json())
    change(data)

    with pytest.raises(FormatError, match=place):
        Plan.from_json(json.dumps(data))


def step(data, wanted):
    return next(item for item in data["steps"] if item["id"] == wanted)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"format": 1}', '{"format": 1, "steps": 3}'])
def test_other_texts_are_no_plan(text):
    with pytest.raises(FormatError):
        Plan.from_json(text)


def test_a_step_before_one_that_it_waits_for_is_no_plan():
    steps = (HandOver(id="hand-over", after=("attach",)), AttachEngine(id="attach", run_dir="/run/x"))

    with pytest.raises(ValueError, match="before one it waits for"):
        Plan(operation="launch", driver="n610", subject="x", steps=steps)


def test_equal_plans_do_not_differ(planned):
    assert planned(fleet.capture()).diff(planned(fleet.capture())) == ""


def test_a_difference_shows_the_lines_that_changed(planned):
    text = planned(fleet.capture()).diff(planned(fleet.capture(then="keep")))

    assert "-        leave: stopped" in text
    assert "+        leave: running" in text
    assert "sha256" not in text.replace("criu_digest: sha256", "")


def test_costs_are_printed_only_from_an_earlier_report(planned):
    plan = planned(fleet.capture())
    earlier = Report(operation="capture", plan=plan, receipts=[Receipt(step="dump", seconds=1.25)])

    assert "unknown" in str(plan)
    assert "1.25 s" not in str(plan)
    text = plan.explain(earlier=earlier)
    assert "dump                     1.25 s" in text
    assert "seal               cost unknown" in text


def test_a_barrier_is_printed_at_its_step(planned):
    plan = evolve(planned(fleet.capture()), barriers=(Barrier(name="CRIU_RESTORED", step="dump"),))

    assert "barrier CRIU_RESTORED" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan


def test_values_of_the_environment_are_not_printed(planned):
    spec = fleet.engine(env={"MY_SETTING": "a value that stays where it is"})

    text = str(planned(fleet.launch(spec=spec)))

    assert "MY_SETTING" in text
    assert "a value that stays where it is" not in text
