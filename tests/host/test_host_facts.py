"""Facts as data: text and back, strictly."""

import json
import pickle

import pytest

from coldsnap.errors import AdmissionError, ColdSnapError, FormatError
from coldsnap.host.facts import Facts, FeatureResult, PackFacts, QualificationRecord, StoreFacts
from coldsnap.host.mounts import filesystem_of


@pytest.fixture
def facts(host):
    record = QualificationRecord(
        boot_id="b",
        nvidia_driver="580.1",
        devices=("GPU-0",),
        criu_build_digest=None,
        features=(FeatureResult(name="criu-process-tree", status="passed"),),
        created_unix_ns=1,
    )
    store = StoreFacts(
        root="/store",
        filesystem=filesystem_of("/"),
        packs=(PackFacts(digest="sha256:" + "0" * 64, size_bytes=1, device=2, inode=3, mtime_ns=4),),
    )
    hosts = {"a": host("a"), "b": host("b", driver="580.1", qualification=record, filesystems=(filesystem_of("/"),))}
    return Facts(hosts=hosts, store=store)


def test_facts_survive_a_file_and_a_pickle(facts, tmp_path):
    facts.save(tmp_path / "facts.json")

    assert Facts.load(tmp_path / "facts.json") == facts
    assert Facts.load(tmp_path / "facts.json").digest() == facts.digest()
    assert pickle.loads(pickle.dumps(facts)) == facts


def test_facts_that_were_never_saved_are_missed_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no facts file at .*facts\.json; correct the path") as caught:
        Facts.load(tmp_path / "facts.json")
    assert isinstance(caught.value, ColdSnapError)


@pytest.mark.parametrize(
    ("change", "rule", "says"),
    [
        (lambda plain: plain.update(extra=1), "facts.3", "unknown field extra"),
        (lambda plain: plain["hosts"]["a"].pop("criu"), "facts.3", "missing field criu"),
        (lambda plain: plain["hosts"]["a"].update(boot_id=5), "facts.4", "hosts.a.boot_id: expected str, found int"),
        (lambda plain: plain["hosts"]["a"]["cpu"].update(cores="2"), "facts.4", "cores: expected int, found str"),
        (lambda plain: plain["hosts"]["a"]["cpu"].update(cores=True), "facts.4", "cores: expected int, found bool"),
        (lambda plain: plain["hosts"]["a"]["cpu"].update(flags="avx2"), "facts.4", "flags: expected list, found str"),
        (lambda plain: plain["hosts"].update(a=[]), "facts.4", "hosts.a: expected object, found list"),
        (lambda plain: plain.update(format=2), "facts.2", "format 1"),
        (lambda plain: plain.update(kind="other"), "facts.2", "coldsnap-facts"),
    ],
)
def test_a_file_that_breaks_a_rule_is_refused_with_the_place_and_the_rule(facts, tmp_path, change, rule, says):
    facts.save(tmp_path / "facts.json")
    plain = json.loads((tmp_path / "facts.json").read_text())
    change(plain)
    (tmp_path / "facts.json").write_text(json.dumps(plain))

    with pytest.raises(FormatError, match="facts.json") as caught:
        Facts.load(tmp_path / "facts.json")

    assert caught.value.rule == rule
    assert says in str(caught.value)


def test_a_truncated_file_is_refused(facts, tmp_path):
    facts.save(tmp_path / "facts.json")
    (tmp_path / "facts.json").write_text((tmp_path / "facts.json").read_text()[:-40])

    with pytest.raises(FormatError) as caught:
        Facts.load(tmp_path / "facts.json")

    assert caught.value.rule == "facts.1"


def test_a_host_without_a_gpu_says_so(host):
    assert "no GPU: no NVIDIA driver is loaded" in str(host())


def test_a_host_with_a_gpu_names_it(host):
    text = str(host(driver="580.159.04"))

    assert "NVIDIA H200, compute capability 9.0" in text
    assert "NVIDIA 580.159.04, CUDA 13.0" in text


def test_the_digest_changes_with_any_fact(facts, host):
    changed = Facts(hosts={**facts.hosts, "a": host("a", boot_id="c")}, store=facts.store)

    assert changed.digest() != facts.digest()


def test_an_unknown_host_is_refused_with_the_known_ones(facts):
    with pytest.raises(AdmissionError, match="known: a, b"):
        facts.host("c")


def test_facts_of_a_fleet_come_together(host):
    one, two = Facts(hosts={"a": host("a")}), Facts(hosts={"b": host("b")})

    assert set(one.merge(two).hosts) == {"a", "b"}


def test_a_callers_dict_is_not_shared(host):
    given = {"a": host("a")}
    facts = Facts(hosts=given)
    given.clear()

    assert set(facts.hosts) == {"a"}
