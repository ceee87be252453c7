"""Which snapshot driver a placement gets."""

import pytest

from coldsnap.errors import AdmissionError
from coldsnap.host.contracts import CONTRACTS, FEATURES, STATUSES
from coldsnap.host.facts import Facts, FeatureResult, QualificationRecord
from coldsnap.host.selection import select_driver


def record(*, failing=()):
    results = [
        FeatureResult(name=name, status="failed" if name in failing else "passed", reason="why") for name in FEATURES
    ]
    return QualificationRecord(
        boot_id="b",
        nvidia_driver="580.1",
        devices=("GPU-0",),
        criu_build_digest=None,
        features=tuple(results),
        created_unix_ns=0,
    )


@pytest.fixture
def choose(host):
    def run(*hosts, **options):
        facts = Facts(hosts={each.name: each for each in hosts})
        return select_driver(facts, [each.name for each in hosts], **options)

    return run


@pytest.mark.parametrize(
    ("drivers", "chosen"),
    [
        (("610.1",), "n610"),
        (("700.1",), "n610"),
        (("580.1",), "n580"),
        (("609.99",), "n580"),
        (("620.1", "580.1"), "n580"),
        (("620.1", "610.0"), "n610"),
    ],
)
def test_the_smallest_driver_of_the_placement_decides(choose, host, drivers, chosen):
    hosts = [host(f"h{number}", driver=driver) for number, driver in enumerate(drivers)]

    assert choose(*hosts)[0] == chosen


def test_an_older_driver_is_refused_by_host(choose, host):
    with pytest.raises(AdmissionError, match="old: NVIDIA driver 570, needed 580"):
        choose(host("new", driver="610.1"), host("old", driver="570.1"))


@pytest.mark.parametrize("drivers", [("580.1",), ("700.1", "610.1"), (None,)])
def test_n580_can_be_asked_for_wherever_it_can_be(choose, host, drivers):
    hosts = [host(f"h{number}", driver=driver) for number, driver in enumerate(drivers)]

    chosen, reason = choose(*hosts, compatibility_driver="n580")

    assert chosen == "n580"
    assert "asks for it" in reason


def test_n580_that_is_asked_for_still_has_a_floor(choose, host):
    with pytest.raises(AdmissionError, match="h: NVIDIA driver 575, needed 580"):
        choose(host("h", driver="575.1"), compatibility_driver="n580", workers=2)


def test_hosts_without_a_gpu_get_process_state_only_and_a_reason(choose, host):
    chosen, reason = choose(host("a"), host("b"))

    assert chosen == "n610"
    assert "no CUDA step" in reason


def test_a_mixed_placement_is_refused(choose, host):
    with pytest.raises(AdmissionError, match="a: no GPU"):
        choose(host("a"), host("b", driver="610.1"))


def test_gpus_that_could_not_be_listed_are_never_guessed(choose, host):
    with pytest.raises(AdmissionError, match="not guessed"):
        choose(host("a", driver="610.1", gpus=(), gpus_known=False, gpu_reason="cuda-bindings is missing"))


def test_a_gpu_without_a_known_driver_version_is_refused(choose, host):
    with pytest.raises(AdmissionError, match="version of the NVIDIA driver is unknown"):
        choose(host("a", driver="610.1", nvidia_driver=None))


def test_a_placement_without_hosts_is_refused(host):
    with pytest.raises(AdmissionError, match="names no host"):
        select_driver(Facts(hosts={}), [])


@pytest.mark.parametrize("driver", ["570.1", "580.1", "610.1"])
def test_probed_admits_one_worker_with_a_passed_record(choose, host, driver):
    chosen, reason = choose(host(driver=driver, qualification=record()), compatibility_driver="probed")

    assert chosen == "n610"
    assert "qualification record" in reason


def test_probed_without_a_record_says_what_to_run(choose, host):
    with pytest.raises(AdmissionError, match=r"never qualified.*qualify_host"):
        choose(host(driver="580.1"), compatibility_driver="probed")


def test_probed_names_every_feature_that_has_not_passed(choose, host):
    failing = record(failing=("cuda-classic-ipc", "cuda-initialized-state"))

    with pytest.raises(AdmissionError) as caught:
        choose(host(driver="580.1", qualification=failing), compatibility_driver="probed")

    assert len(caught.value.mismatches) == 2
    assert "cuda-classic-ipc is failed: why" in caught.value.mismatches[0]


def test_probed_still_has_a_floor(choose, host):
    with pytest.raises(AdmissionError, match="needed 570 or newer even when probed"):
        choose(host(driver="560.1", qualification=record()), compatibility_driver="probed")


def test_probed_with_several_workers_goes_by_the_number_and_says_so(choose, host):
    chosen, reason = choose(host(driver="580.1", qualification=record()), compatibility_driver="probed", workers=2)

    assert chosen == "n580"
    assert "several workers" in reason


def test_a_feature_nobody_probed_is_unqualified():
    assert record().result("something new").status == "unqualified"


def test_contracts_name_known_features_only():
    for contract in CONTRACTS.values():
        assert set(contract.features) <= set(FEATURES)
    assert "passed" in STATUSES
