"""Packs are published once and staged by digest, through the hub's real client and a server that speaks to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import attrs
import pytest
from hub_server import HubServer
from memory import captured, payload
from test_store import payload_of, write_native

import coldsnap
from coldsnap.artifact.hub import Hub
from coldsnap.artifact.pack import Bytes
from coldsnap.artifact.payloads import PayloadObject
from coldsnap.artifact.store import Store
from coldsnap.errors import ArtifactError, IntegrityError, PayloadMissingError

SOURCE = str(Path(coldsnap.__file__).parents[1])
REPOSITORY = "owner/packs"

# The client's own call into its HTTP library, in the upload without its storage protocol.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")


@pytest.fixture(name="server")
def _server(monkeypatch: pytest.MonkeyPatch):
    # The hub's own protocol for large files needs its storage; the client falls back to LFS without it.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", True)
    with HubServer() as server:
        yield server


@pytest.fixture(name="hub")
def _hub(server: HubServer) -> Hub:
    return Hub(repository=REPOSITORY, endpoint=server.endpoint, token="hf_test")


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture(name="item")
def _item(tmp_path: Path, store: Store) -> PayloadObject:
    return payload(captured(tmp_path, store)[0])


def test_a_pack_is_uploaded_once_and_resolves_to_a_commit(server: HubServer, hub: Hub, store: Store, item) -> None:
    first = hub.publish([item], store, create=True)
    second = hub.publish([item], store)

    assert [item.sha256.removeprefix("sha256:")] == server.uploads
    assert (first.revision, (item.sha256,), (), item.bytes) == (
        server.commits[REPOSITORY][-1][0],
        first.uploaded,
        first.present,
        first.bytes,
    )
    assert (first.revision, (), (item.sha256,), 0) == (second.revision, second.uploaded, second.present, second.bytes)
    assert 40 == len(first.revision)


def test_several_owners_of_one_pack_upload_it_once(server: HubServer, hub: Hub, store: Store, item) -> None:
    owners = [attrs.evolve(item, worker=str(worker)) for worker in range(4)]

    published = hub.publish(owners, store, create=True)

    assert 1 == len(server.uploads)
    assert (item.sha256,) == published.uploaded


def test_an_artifact_published_after_another_sends_only_its_own_packs(
    tmp_path: Path, server: HubServer, hub: Hub, store: Store
) -> None:
    one = write_native(tmp_path / "one", store).descriptor.weights.payloads.objects
    two = write_native(tmp_path / "two", store, seed=1).descriptor.weights.payloads.objects
    hub.publish(one, store, create=True)

    published = hub.publish([*one, attrs.evolve(two[0], worker="1")], store)

    assert (two[0].sha256,) == published.uploaded
    assert 2 == len(server.uploads)


def test_content_that_the_hub_has_elsewhere_is_committed_and_not_sent(
    server: HubServer, hub: Hub, store: Store, item
) -> None:
    hub.publish([item], store, create=True)
    other = attrs.evolve(hub, repository="owner/others")
    other.publish([item], store, create=True)

    assert 1 == len(server.uploads)


def test_a_damaged_or_absent_pack_is_not_published(server: HubServer, hub: Hub, store: Store, item) -> None:
    path = store.path(item.sha256)
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    with pytest.raises(IntegrityError):
        hub.publish([item], store, create=True)
    store.delete(item.sha256)
    with pytest.raises(PayloadMissingError):
        hub.publish([item], store, create=True)
    assert {} == server.commits


def test_other_bytes_under_the_name_of_a_pack_are_an_error(server: HubServer, hub: Hub, store: Store, item) -> None:
    server.create(REPOSITORY)
    server.blobs["ab" * 32] = b"other"
    revision = server.commit(REPOSITORY, {item.path: ("ab" * 32, 5)})

    with pytest.raises(IntegrityError, match="other bytes"):
        hub.publish([item], store)
    store.delete(item.sha256)
    with pytest.raises(IntegrityError, match="other bytes"):
        hub.stage(item, store, revision)
    assert [] == server.ranges


def test_an_absent_repository_is_named(hub: Hub, store: Store, item) -> None:
    with pytest.raises(ArtifactError, match="owner/packs cannot list the packs"):
        hub.publish([item], store)


@pytest.fixture(name="elsewhere")
def _elsewhere(tmp_path: Path) -> Store:
    return Store(tmp_path / "elsewhere")


def test_a_published_pack_is_staged_into_another_store(hub: Hub, store: Store, elsewhere: Store, item) -> None:
    revision = hub.publish([item], store, create=True).revision

    admission = hub.stage(item, elsewhere, revision)

    assert "revalidated_existing" == admission.validation.reason
    assert store.path(item.sha256).read_bytes() == elsewhere.path(item.sha256).read_bytes()
    assert "cached_validation" == hub.stage(item, elsewhere, revision).validation.reason


def test_each_worker_may_name_its_file(server: HubServer, hub: Hub, store: Store, elsewhere: Store, item) -> None:
    hub.publish([item], store, create=True)
    revision = server.commit(REPOSITORY, {"mine/worker0.pack": (item.sha256[7:], item.bytes)})

    staged = hub.stage(item, elsewhere, revision, files_by_worker={"0": "mine/worker0.pack"})
    assert str(elsewhere.path(item.sha256)) == staged.path


def test_an_absent_pack_and_an_absent_revision_have_their_own_errors(
    server: HubServer, hub: Hub, elsewhere: Store, item
) -> None:
    server.create(REPOSITORY)
    with pytest.raises(PayloadMissingError) as caught:
        hub.stage(item, elsewhere, server.commits[REPOSITORY][0][0])
    assert item.sha256 == caught.value.digest
    with pytest.raises(ArtifactError, match="cannot be fetched"):
        hub.stage(item, elsewhere, "0" * 40)


def test_a_hub_that_sends_other_bytes_is_found_out(
    server: HubServer, hub: Hub, store: Store, elsewhere: Store, item
) -> None:
    revision = hub.publish([item], store, create=True).revision
    server.lie = b"\x00" * item.bytes

    with pytest.raises(IntegrityError, match=r"rule store\.3"):
        hub.stage(item, elsewhere, revision)
    assert not elsewhere.path(item.sha256).exists()
    server.lie = None
    assert item.bytes == hub.stage(item, elsewhere, revision).bytes


@pytest.fixture(name="large")
def _large(store: Store) -> PayloadObject:
    # The client hands over chunks of 10 MiB: a download that ends within its first one has nothing to go on from.
    return payload_of(store.write([Bytes(os.urandom(24 << 20))]))


def test_a_broken_connection_is_resumed_within_one_call(
    server: HubServer, hub: Hub, store: Store, elsewhere: Store, large: PayloadObject
) -> None:
    revision = hub.publish([large], store, create=True).revision
    server.cut_after = 15 << 20

    assert large.bytes == hub.stage(large, elsewhere, revision).bytes
    assert [None, f"bytes={10 << 20}-"] == server.ranges


STAGER = """
import sys
import huggingface_hub.constants as constants
constants.HF_HUB_DISABLE_XET = constants.HF_HUB_DISABLE_PROGRESS_BARS = True
from coldsnap.artifact.hub import Hub
from coldsnap.artifact.payloads import PayloadObject
from coldsnap.artifact.store import Store
endpoint, revision, root, sha256, size = sys.argv[1:]
item = PayloadObject(worker="0", path=f"model-payloads/sha256/{sha256[7:]}.pack", bytes=int(size), sha256=sha256)
hub = Hub(repository="owner/packs", endpoint=endpoint, token="hf_test")
print(hub.stage(item, Store(root), revision).validation.reason)
"""


def stager(server: HubServer, revision: str, store: Store, item: PayloadObject) -> subprocess.Popen[str]:
    arguments = [server.endpoint, revision, str(store.root), item.sha256, str(item.bytes)]
    return subprocess.Popen(
        [sys.executable, "-c", STAGER, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )


def test_a_killed_staging_is_resumed_by_the_next_process(
    server: HubServer, hub: Hub, store: Store, elsewhere: Store, large: PayloadObject
) -> None:
    item = large
    revision = hub.publish([item], store, create=True).revision
    server.bytes_per_s = 40 << 20
    first = stager(server, revision, elsewhere, item)
    staging = elsewhere.directory / f".{item.sha256[7:]}.staging" / "download"
    deadline = time.monotonic() + 60
    while not (staging.exists() and staging.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=30)
    there = staging.stat().st_size
    assert 0 < there < item.bytes
    assert not elsewhere.path(item.sha256).exists()

    server.bytes_per_s = None
    second = stager(server, revision, elsewhere, item)
    out, err = second.communicate(timeout=60)

    assert (0, "revalidated_existing") == (second.returncode, out.strip()), err
    assert [None, f"bytes={there}-"] == server.ranges
    assert not staging.exists()


def test_several_processes_download_one_pack_once(
    server: HubServer, hub: Hub, store: Store, elsewhere: Store, item
) -> None:
    revision = hub.publish([item], store, create=True).revision

    stagers = [stager(server, revision, elsewhere, item) for _ in range(4)]
    ended = [one.communicate(timeout=120) for one in stagers]

    assert [0] * 4 == [one.returncode for one in stagers], ended
    assert [None] == server.ranges
