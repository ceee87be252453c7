"""No value of the policy is silently ignored: it changes a plan, or is refused, or is what happens anyway."""

import fleet
import pytest

from coldsnap.behaviour import engine_defaults
from coldsnap.errors import AdmissionError, PolicyError, UnsupportedError
from coldsnap.operation import Prepare, local
from coldsnap.policy import Policy
from coldsnap.policy.samples import every_leaf_and_legal_value
from coldsnap.resolve import resolve

SECRET = fleet.engine(env={"MY_API_KEY": "x"})
CPU, GPU = fleet.cpu_host(), fleet.gpu_host()
# Between the two releases a record of this boot decides, and only for compatibility.driver = "probed".
PROBED = fleet.gpu_host("580.82.07")
SCENARIOS = {
    f"{operation} on {machine}": (made, host)
    for machine, host in {"cpu": CPU, "gpu 610": GPU, "gpu 580, qualified": PROBED}.items()
    for operation, made in {
        "capture": fleet.capture(),
        "restore": fleet.restore(fleet.captured_on(host)),
        "restore of packs": fleet.restore(fleet.with_packs(host)),
        "preparation": Prepare(fleet.with_packs(host), placement=local(port=8000)),
        "launch": fleet.launch(),
        "launch with a secret": fleet.launch(spec=SECRET),
    }.items()
}
VALUES = list(every_leaf_and_legal_value())
CHOOSING = ("auto", "cache-only-auto")  # a value that says that the plan chooses
DEFAULTS = [Policy().resolved(engine_defaults=engine_defaults(native=native)) for native in (False, True)]


def outcomes(policy):
    """Return for every scenario the plan, or the refusal."""
    found = {}
    for name, (operation, host) in SCENARIOS.items():
        try:
            found[name] = resolve(policy, operation, fleet.facts(host))
        except AdmissionError as error:
            found[name] = error
    return found


def alone(companions):
    """Return the policy of the companions; without any where they make no sense by themselves."""
    try:
        return Policy().evolve(**companions)
    except PolicyError:
        return Policy()


def refused(outcome, path):
    return isinstance(outcome, UnsupportedError) and (
        outcome.field == path or any(line.startswith(f"{path} ") for line in outcome.mismatches)
    )


def steps(outcome):
    """Return what would be done: two refusals do the same."""
    return None if isinstance(outcome, AdmissionError) else outcome.steps


def shown(value):
    """Return a value as plans show it."""
    if isinstance(value, tuple):
        return ",".join(value) or "nothing"
    return str(value).lower() if isinstance(value, bool) else str(value)


def decided(outcome, path):
    """Return the text that a plan says holds for a leaf."""
    if isinstance(outcome, AdmissionError):
        return None
    return next((decision.effective for decision in outcome.decisions if decision.name == path), None)


@pytest.mark.parametrize("legal", VALUES, ids=[f"{value.path}={str(value.value)[:30]}" for value in VALUES])
def test_a_value_changes_what_is_done_or_is_refused_or_is_what_happens_anyway(legal):
    policy = legal.policy
    found, without = outcomes(policy), outcomes(alone(legal.companions))

    newly = [name for name in SCENARIOS if refused(found[name], legal.path) and not refused(without[name], legal.path)]
    if newly:
        # Never ignored here and refused there: elsewhere it is done, or it is about another operation.
        for name in set(SCENARIOS) - set(newly):
            outcome = found[name]
            told = decided(outcome, legal.path) in {None, "not used", shown(legal.value)}
            done = told or steps(outcome) != steps(without[name])
            assert isinstance(outcome, AdmissionError) or done, name
        return
    if any(steps(found[name]) != steps(without[name]) for name in SCENARIOS):
        return
    effective = {decided(outcome, legal.path) for outcome in found.values()} - {None}
    # ``auto`` may come to anything, but then the plan says to what.
    told = effective if legal.value in CHOOSING else effective == {shown(legal.value)}
    assert legal.value in {defaults[legal.path] for defaults in DEFAULTS} or told, (
        f"{legal.path} = {legal.value!r} is accepted and changes nothing; the plans say {effective or 'nothing'}"
    )


@pytest.mark.parametrize("legal", VALUES, ids=[f"{value.path}={str(value.value)[:30]}" for value in VALUES])
def test_an_explicit_value_never_comes_to_something_else(legal):
    if legal.value in CHOOSING:
        return
    for outcome in outcomes(legal.policy).values():
        effective = decided(outcome, legal.path)
        assert effective in (None, shown(legal.value), "not used")


def test_a_refusal_names_every_leaf_without_behaviour_at_once():
    leaves = {
        "graphs.asynchronous": True,
        "weights.recovery.distributed": False,
        "process.shape_calibration": "enabled",
    }
    policy = Policy().evolve(**leaves)

    with pytest.raises(UnsupportedError) as refusal:
        resolve(policy, fleet.capture(), fleet.facts(CPU))

    text = str(refusal.value)
    assert refusal.value.works
    for path in leaves:
        assert path in text
