"""Where a plan puts weights, and where it takes them from."""

import fleet
import pytest
from attrs import evolve

from coldsnap.errors import AdmissionError, PayloadMissingError, PolicyError, UnsupportedError
from coldsnap.host.facts import Facts, FilesystemFacts, PackFacts, StoreFacts
from coldsnap.operation import Materialize, Prepare, Sleep, Wake, local
from coldsnap.plan import Plan
from coldsnap.policy import Policy
from coldsnap.resolve import resolve

GPU = fleet.gpu_host()


def steps(plan):
    return [step.id for step in plan]


def before(plan, first, second):
    order = steps(plan)
    return order.index(first) < order.index(second)


def with_store(host, *digests, root="/store"):
    filesystem = FilesystemFacts(
        path=root,
        type="ext4",
        source="/dev/x",
        mountpoint="/",
        device="8:1",
        free_bytes=1 << 40,
        kind="local",
        read_only=False,
    )
    packs = tuple(PackFacts(digest=one, size_bytes=1 << 30, device=1, inode=2, mtime_ns=3) for one in digests)
    return Facts(hosts={host.name: host}, store=StoreFacts(root=root, filesystem=filesystem, packs=packs))


def test_weights_leave_before_the_driver_moves_anything_and_come_back_before_requests_do(planned):
    plan = planned(fleet.capture_handle(then="keep"), GPU)

    order = ["quiesce", "release", "lock-cuda", "checkpoint-cuda", "dump", "restore-cuda", "unlock-cuda", "hydrate"]
    assert [step for step in steps(plan) if step in order] == order
    assert plan["resume"].after == ("hydrate",)
    assert plan["seal"].weights == "packs"


def test_a_workload_that_is_stopped_does_not_get_its_memory_back(planned):
    assert "hydrate" not in steps(planned(fleet.capture(), GPU))


def test_a_restore_reads_ahead_while_processes_come_back_and_asks_nothing_before_all_is_verified(planned):
    plan = planned(fleet.restore(fleet.with_packs(GPU)), GPU)

    assert "prefetch" not in {wait for step in plan for wait in step.after}
    assert plan["hydrate"].after == ("reconnect",)
    assert {"ready", "verify", "verify-packs"} == set(plan["answer"].after)
    assert before(plan, "admit-packs", "keeper") and "admit-packs" in plan["keeper"].after


def test_preverified_bytes_are_not_moved_before_their_evidence_was_looked_at(planned):
    plan = planned(fleet.restore(fleet.with_packs(GPU)), GPU, **{"io.verify_mode": "preverified"})
    assert {"verify", "verify-packs"} < set(plan["hydrate"].after)
    assert plan["admit-packs"].evidence


@pytest.mark.parametrize("backend", ["direct", "gds"])
def test_what_goes_around_the_page_cache_is_not_read_into_it(planned, backend):
    leaves = {"io.hydration_backend": backend, "io.verify_mode": "preverified"}
    assert "prefetch" not in steps(planned(fleet.restore(fleet.with_packs(GPU)), GPU, **leaves))


def test_the_store_is_the_named_one_else_the_probed_one_else_beside_the_artifact():
    for operation, step in ((fleet.capture, "release"), (partial_restore, "hydrate")):
        probed = with_store(GPU, fleet.DIGEST, root="/probed")
        assert resolve(Policy(), operation(store="/named"), probed)[step].store == "/named"
        assert resolve(Policy(), operation(), probed)[step].store == "/probed"
        assert resolve(Policy(), operation(), fleet.facts(GPU))[step].store == "/artifacts/store"


def partial_restore(**options):
    return fleet.restore(fleet.with_packs(GPU, recoverable=False), **options)


def test_a_pack_that_the_probed_store_lacks_is_named_before_anything_starts():
    with pytest.raises(PayloadMissingError, match="was not in the store /store when it was probed") as missing:
        resolve(Policy(), partial_restore(), with_store(GPU))
    assert missing.value.digest == fleet.DIGEST


def test_a_store_inside_the_output_is_refused(planned):
    with pytest.raises(AdmissionError, match="lies in the output"):
        planned(fleet.capture(store=f"{fleet.OUTPUT}/store"), GPU)


def test_shared_memory_that_the_engine_cannot_see_is_refused_unless_it_shares_the_hosts(planned):
    with pytest.raises(AdmissionError, match="/dev/shm/store lies in /dev/shm"):
        planned(fleet.capture(store="/dev/shm/store"), GPU)
    assert planned(fleet.capture(store="/dev/shm/store"), GPU, **{"process.namespace": "host"})


def test_several_workers_keep_their_weights_in_the_image(planned):
    two, host = fleet.engine(args=("--tensor-parallel-size", "2")), fleet.gpu_host(count=2)
    plan = planned(fleet.capture(spec=two), host)
    assert plan["seal"].weights == "image"
    assert "several workers" in plan.decision("weights.mode").reason
    with pytest.raises(UnsupportedError, match="several workers") as refusal:
        planned(fleet.capture(spec=two), host, **{"weights.mode": "native"})
    assert refusal.value.field == "weights.mode"


def test_a_kv_cache_in_the_image_cannot_be_thrown_away(planned):
    with pytest.raises(UnsupportedError, match="cannot be thrown away"):
        planned(fleet.capture(), **{"process.discard": ["kv_cache"]})
    assert planned(fleet.capture(), GPU, **{"process.discard": []})["release"].discard == ()


def test_an_artifact_that_has_a_checkpoint_alone_is_recovered(planned):
    packed = fleet.with_packs(GPU)
    only = fleet.captured_on(GPU, weights=evolve(packed.descriptor.weights, payloads=None))

    plan = planned(fleet.restore(only), GPU)

    assert plan["admit-packs"].provider == "recovery"
    assert plan.decision("weights.mode").effective == "recovery"
    with pytest.raises(UnsupportedError, match="are in a pinned checkpoint") as refusal:
        planned(fleet.restore(only), GPU, **{"weights.mode": "native"})
    assert (refusal.value.field, refusal.value.works) == ("weights.mode", 'weights.mode = "auto" or "recovery"')


@pytest.mark.parametrize(
    ("mode", "provider"),
    [("auto", "either"), ("cache-only-auto", "either"), ("native", "native"), ("recovery", "recovery")],
)
def test_only_auto_leaves_it_to_the_store_who_brings_the_weights(planned, mode, provider):
    plan = planned(fleet.restore(fleet.with_packs(GPU)), GPU, **{"weights.mode": mode})

    assert plan["admit-packs"].provider == provider
    assert bool(plan["hydrate"].loader_backend) == (provider != "native")
    assert plan["prefetch"].checkpoint == (provider != "native")
    assert ("provider" in {choice.name for choice in plan.choices}) == (provider == "either")


def test_without_a_recorded_load_there_are_packs_alone(planned):
    artifact = fleet.with_packs(GPU, recoverable=False)

    assert planned(fleet.restore(artifact), GPU)["admit-packs"].provider == "native"
    with pytest.raises(UnsupportedError, match="are in packs") as refusal:
        planned(fleet.restore(artifact), GPU, **{"weights.mode": "recovery"})
    assert refusal.value.works == 'weights.mode = "auto" or "native"'


def test_a_pack_that_the_probed_store_lacks_makes_the_plan_say_that_the_checkpoint_is_read():
    absent = resolve(Policy(), fleet.restore(fleet.with_packs(GPU)), with_store(GPU))
    there = resolve(Policy(), fleet.restore(fleet.with_packs(GPU)), with_store(GPU, fleet.DIGEST))

    assert absent.decision("weights.mode").effective == "recovery"
    assert fleet.DIGEST in absent.decision("weights.mode").reason
    assert there.decision("weights.mode").effective == "native"
    assert absent["admit-packs"] == there["admit-packs"]


@pytest.mark.parametrize(
    ("artifact", "leaves"),
    [
        (fleet.with_packs(GPU, repository="example/packs"), {}),
        (
            fleet.with_packs(GPU),
            {"weights.native.repository": "example/packs", "weights.native.revision": fleet.REVISION},
        ),
    ],
    ids=["published", "policy"],
)
def test_auto_does_not_recover_what_can_be_fetched(artifact, leaves):
    restore = fleet.restore(artifact)
    with pytest.raises(PayloadMissingError, match=f"fetch required: .* published in example/packs at {fleet.REVISION}"):
        resolve(Policy().evolve(**leaves), restore, with_store(GPU))

    unknown = resolve(Policy().evolve(**leaves), restore, fleet.facts(GPU))
    assert unknown["admit-packs"].repository == f"example/packs at {fleet.REVISION}"
    for mode in ("cache-only-auto", "recovery"):
        plan = resolve(Policy().evolve(**leaves, **{"weights.mode": mode}), restore, with_store(GPU))
        assert plan.decision("weights.mode").effective == "recovery"
        assert plan["admit-packs"].repository == ""


def test_a_capture_for_recovery_demands_that_it_can_be_done(planned):
    wanted = {
        mode: planned(fleet.capture(), GPU, **{"weights.mode": mode})["release"].recovery
        for mode in ("auto", "cache-only-auto", "recovery", "native")
    }
    assert wanted == {"auto": "auto", "cache-only-auto": "auto", "recovery": "required", "native": "auto"}
    off = planned(fleet.capture(), GPU, **{"weights.mode": "native", "weights.recovery.enabled": False})
    assert off["release"].recovery == "off"
    with pytest.raises(UnsupportedError, match="no memory whose contents can leave"):
        planned(fleet.capture(), **{"weights.mode": "recovery"})


def test_sleep_needs_memory_that_can_leave(planned):
    with pytest.raises(UnsupportedError, match="has no memory that can leave"):
        planned(Sleep(fleet.Handle()))
    with pytest.raises(UnsupportedError, match="wants the weights in the process"):
        planned(Sleep(fleet.Handle()), GPU, **{"weights.mode": "image"})
    assert planned(Sleep(fleet.Handle(), store="/named"), GPU)["sleep"].store == "/named"
    assert planned(Wake(fleet.Handle()), GPU)["wake"].tags == ("weights", "kv_cache")


@pytest.mark.parametrize("tags", [(), ("weights", "weights"), ("graphs",)])
def test_only_regions_that_there_are_can_be_woken(tags):
    with pytest.raises(PolicyError, match="expected some of weights, kv_cache"):
        Wake(fleet.Handle(), tags=tags)


def test_only_the_handle_of_an_engine_sleeps():
    with pytest.raises(PolicyError, match="expected the handle of a running engine"):
        Sleep("/run/coldsnap/tiny")


@pytest.mark.parametrize("repository", ["example/packs", None])
def test_a_preparation_fetches_what_the_probed_store_lacks_where_a_repository_is_known(repository):
    artifact, facts = fleet.with_packs(GPU, repository=repository, recoverable=False), with_store(GPU)
    prepare = Prepare(artifact, placement=local(port=8000))
    if repository is None:
        with pytest.raises(PayloadMissingError, match="was not in the store /store"):
            resolve(Policy(), prepare, facts)
        return

    plan = resolve(Policy(), prepare, facts)

    fetch = plan["fetch-packs"]
    assert (fetch.store, fetch.repository, fetch.revision) == ("/store", "example/packs", fleet.REVISION)
    assert "fetch-packs" in plan["admit-packs"].after
    assert before(plan, "fetch-packs", "admit-packs")
    assert Plan.from_json(plan.to_json()) == plan


def test_the_repository_of_the_policy_comes_before_the_one_that_the_artifact_names():
    artifact = fleet.with_packs(GPU, repository="example/packs")
    chosen = Policy().evolve(**{"weights.native.repository": "our/mirror", "weights.native.revision": "b" * 40})
    plan = resolve(chosen, Prepare(artifact, placement=local(port=8000)), with_store(GPU))
    assert (plan["fetch-packs"].repository, plan["fetch-packs"].revision) == ("our/mirror", "b" * 40)


def test_a_pack_is_fetched_from_where_the_policy_says_or_not_at_all():
    artifact = fleet.with_packs(GPU, repository="example/packs")
    chosen = {"weights.native.repository": "our/mirror", "weights.native.revision": "b" * 40}
    prepare = Prepare(artifact, placement=local(port=8000))
    named = Policy().evolve(**chosen, **{"weights.native.files_by_worker": {"worker-0": "mine.pack"}})
    assert resolve(named, prepare, with_store(GPU))["fetch-packs"].files == (("worker-0", "mine.pack"),)
    other = Policy().evolve(**chosen, **{"weights.native.files_by_worker": {"worker-1": "mine.pack"}})
    with pytest.raises(UnsupportedError, match="no file in the repository is named for worker-0"):
        resolve(other, prepare, with_store(GPU))


def test_a_pack_is_made_of_the_checkpoint_into_the_named_store_else_the_probed_else_beside_the_artifact():
    artifact = fleet.with_packs(GPU)
    assert resolve(Policy(), Materialize(artifact, store="/named"), with_store(GPU))["materialize"].store == "/named"
    assert resolve(Policy(), Materialize(artifact), with_store(GPU))["materialize"].store == "/store"
    plan = resolve(Policy(), Materialize(artifact), fleet.facts(GPU))
    assert plan["materialize"].store == "/artifacts/store"
    assert Plan.from_json(plan.to_json()) == plan
