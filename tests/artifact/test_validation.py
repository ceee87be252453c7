"""One decision about a pack, whoever asks and through whatever."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import attrs
import pytest

import coldsnap
from coldsnap.artifact import canonical, record, service
from coldsnap.artifact.admission import Admission, Request, check, decide, record_path
from coldsnap.artifact.durable import staged_file
from coldsnap.artifact.pack import Bytes, Pack, write_pack
from coldsnap.artifact.service import ValidationService, write_token
from coldsnap.artifact.validate import Transport, validate
from coldsnap.errors import ArtifactError, FormatError, IntegrityError, PolicyError

EXAMPLES = Path(__file__).parents[2] / "examples"
SOURCE = str(Path(coldsnap.__file__).parents[1])


@pytest.fixture(name="made")
def _made(tmp_path: Path) -> tuple[Path, Pack]:
    tmp_path.chmod(0o700)
    with staged_file(tmp_path, "new") as staged:
        pack = write_pack(staged, [Bytes(b"model" * 2000), Bytes(b"weights")])
        path = tmp_path / f"{pack.sha256[7:]}.pack"
        staged.publish(path)
    return path, pack


@pytest.fixture(name="request_")
def _request(made) -> Request:
    path, pack = made
    return Request(path=str(path), expected_sha256=pack.sha256, expected_bytes=pack.bytes, worker="0")


@pytest.fixture(name="command")
def _command(tmp_path: Path) -> tuple[str, ...]:
    # What a user would install: an executable with an absolute path, here one that finds this very package.
    path = tmp_path / "verify"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={SOURCE} exec {sys.executable} {EXAMPLES / "verify_payload.py"} "$@"\n')
    path.chmod(0o755)
    return (str(path),)


@pytest.fixture(name="rpc")
def _rpc(tmp_path: Path):
    write_token(tmp_path / "token")
    with ValidationService(tmp_path / "v.sock", tmp_path / "token"):
        yield Transport(name="rpc", rpc_socket=tmp_path / "v.sock", rpc_token_file=tmp_path / "token", timeout_s=30)


def test_the_first_admission_reads_everything_and_the_next_nothing(request_: Request) -> None:
    first, second = decide(request_), decide(request_)

    assert ("revalidated_existing", request_.expected_bytes) == (
        first.validation.reason,
        first.validation.bytes_hashed,
    )
    assert ("cached_validation", 0) == (second.validation.reason, second.validation.bytes_hashed)
    assert 0o600 == stat.S_IMODE(os.stat(request_.record).st_mode)


def test_a_touched_pack_is_read_again_and_a_renamed_or_rechmodded_one_is_not(request_: Request, made) -> None:
    path, _ = made
    decide(request_)

    os.utime(path)
    assert "revalidated_existing" == decide(request_).validation.reason
    path.chmod(0o400)
    assert "cached_validation" == decide(request_).validation.reason


@pytest.mark.parametrize("verify", ["evidence", "full"])
def test_a_flip_with_a_new_mtime_is_refused_under_both(request_: Request, made, verify) -> None:
    path, _ = made
    decide(request_)
    flip(path)

    with pytest.raises(IntegrityError, match=r"rule validation\.4"):
        decide(attrs.evolve(request_, verify=verify))


def test_a_flip_with_a_restored_mtime_is_refused_under_full_only(request_: Request, made) -> None:
    path, pack = made
    decide(request_)
    flip(path, restore_mtime=True)

    assert "cached_validation" == decide(request_).validation.reason
    with pytest.raises(IntegrityError, match=r"rule validation\.4"):
        decide(attrs.evolve(request_, verify="full"))
    with pytest.raises(IntegrityError):
        decide(attrs.evolve(request_, verify="full"), index=pack.entries)


def flip(path: Path, *, restore_mtime: bool = False) -> None:
    before = path.stat()
    with path.open("r+b") as stream:
        stream.seek(5)
        stream.write(b"!")
    if restore_mtime:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("verify", ["evidence", "full"])
def test_a_truncation_is_refused(request_: Request, made, verify) -> None:
    os.truncate(made[0], 100)
    request = attrs.evolve(request_, verify=verify)

    with pytest.raises(IntegrityError, match=r"rule validation\.2"):
        decide(request)
    with pytest.raises(IntegrityError, match=r"rule validation\.4"):
        decide(attrs.evolve(request, expected_bytes=0))
    assert not os.path.exists(request_.record)


def test_an_index_is_bound_by_a_full_verification_and_then_takes_its_place(request_: Request, made) -> None:
    path, pack = made
    full = attrs.evolve(request_, verify="full")
    decide(full, index=pack.entries)
    bound = Path(request_.record).read_bytes()
    assert "index_sha256" in json.loads(bound)

    # The file is touched and flipped back and forth: the extents alone find it, with the rule of the extent.
    assert "revalidated_existing" == decide(full, index=pack.entries).validation.reason
    assert bound == Path(request_.record).read_bytes()
    flip(path)
    with pytest.raises(IntegrityError, match=r"rule pack\.5"):
        decide(full, index=pack.entries)


def test_a_record_of_another_file_or_digest_does_not_hold(request_: Request, made) -> None:
    path, pack = made
    decide(request_)
    wrong = attrs.evolve(request_, expected_sha256="sha256:" + "0" * 64)

    with pytest.raises(IntegrityError, match=r"rule validation\.4"):
        decide(wrong)
    other = path.with_name("other.pack")
    path.rename(other)
    os.rename(request_.record, record_path(other))
    moved = attrs.evolve(request_, path=str(other))
    assert "revalidated_existing" == decide(moved).validation.reason
    assert pack.bytes == decide(moved).bytes


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"format":2}', b"\xff" * 100, b" " * (2 << 20)])
def test_a_damaged_record_is_as_good_as_none(request_: Request, damage: bytes) -> None:
    decide(request_)
    Path(request_.record).write_bytes(damage)

    assert "revalidated_existing" == decide(request_).validation.reason
    assert "cached_validation" == decide(request_).validation.reason


def test_links_and_open_files_are_refused(request_: Request, made, tmp_path: Path) -> None:
    path, _ = made
    decide(request_)
    Path(request_.record).chmod(0o644)
    with pytest.raises(FormatError, match=r"rule evidence\.3"):
        decide(request_)
    Path(request_.record).rename(tmp_path / "moved")
    Path(request_.record).symlink_to(tmp_path / "moved")
    with pytest.raises(FormatError, match=r"rule evidence\.1"):
        decide(request_)
    Path(request_.record).unlink()
    path.chmod(0o640)
    with pytest.raises(FormatError, match=r"rule evidence\.3"):
        decide(request_)
    path.rename(tmp_path / "pack")
    path.symlink_to(tmp_path / "pack")
    with pytest.raises(FormatError, match=r"rule evidence\.1"):
        decide(request_)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_foreign_pack_is_refused(request_: Request, made) -> None:
    os.chown(made[0], 65534, -1)

    with pytest.raises(FormatError, match=r"rule evidence\.2"):
        decide(request_)


def test_all_transports_give_the_same_admission_and_the_same_record(request_: Request, command, rpc: Transport) -> None:
    transports = [Transport(name="python"), Transport(name="cli", command=command), rpc]
    answers: list[tuple[Admission, Admission, bytes]] = []
    for transport in transports:
        Path(request_.record).unlink(missing_ok=True)
        first = validate(request_, transport)
        answers.append((first, validate(request_, transport), Path(request_.record).read_bytes()))

    assert answers[0] == answers[1] == answers[2]
    assert "revalidated_existing" == answers[0][0].validation.reason
    assert "cached_validation" == answers[0][1].validation.reason


def test_every_transport_refuses_the_same_flip(request_: Request, made, command, rpc: Transport) -> None:
    flip(made[0])
    for transport in (Transport(name="python"), Transport(name="cli", command=command), rpc):
        with pytest.raises(IntegrityError, match=r"rule validation\.4"):
            validate(request_, transport)
        assert not os.path.exists(request_.record)


def test_auto_prefers_a_socket_then_a_command_then_this_process(rpc: Transport) -> None:
    everything = attrs.evolve(rpc, name="auto", command=("/bin/true",))

    assert "rpc" == everything.effective
    assert "cli" == attrs.evolve(everything, rpc_socket=None, rpc_token_file=None).effective
    assert "python" == Transport().effective


def test_a_transport_names_everything_that_is_wrong_with_it() -> None:
    with pytest.raises(PolicyError) as caught:
        Transport(name="rpc", command=("verify",), timeout_s=86401)
    assert {"$.timeout_s", "$.command", "$.rpc_socket"} == {path for path, _ in caught.value.problems}
    for command in ("/usr/../bin/x", "//bin/x", "/bin//x", "./x"):
        with pytest.raises(PolicyError):
            Transport(name="cli", command=(command,))
    for wrong in ({"name": "grpc"}, {"timeout_s": "1800"}, {"timeout_s": float("nan")}, {"command": "verify --now"}):
        with pytest.raises(PolicyError):
            Transport(**wrong)
    assert Path("/run/v.sock") == Transport(rpc_socket="/run/v.sock", rpc_token_file="/run/token").rpc_socket
    assert ("/bin/verify",) == Transport(command="/bin/verify").command
    assert 1800.0 == Transport().timeout_s
    with pytest.raises(PolicyError):
        Transport(name="cli")


def test_a_command_is_given_no_shell_and_has_a_deadline(request_: Request, tmp_path: Path) -> None:
    slow = tmp_path / "slow; touch owned"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)

    begin = time.monotonic()
    with pytest.raises(ArtifactError, match=r"did not answer within 0\.2 s"):
        validate(request_, Transport(name="cli", command=(str(slow),), timeout_s=0.2))
    assert time.monotonic() - begin < 30
    assert not (tmp_path / "owned").exists()
    with pytest.raises(ArtifactError, match="cannot be run"):
        validate(request_, Transport(name="cli", command=("/nonexistent/verify",)))


def test_all_that_a_late_command_has_started_ends_with_it(request_: Request, tmp_path: Path) -> None:
    late, started = tmp_path / "late", tmp_path / "started"
    late.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {started}.new\nmv {started}.new {started}\nwait\n")
    late.chmod(0o755)

    with pytest.raises(ArtifactError, match="did not answer within 2 s"):
        validate(request_, Transport(name="cli", command=(str(late),), timeout_s=2))
    state, end = Path(f"/proc/{started.read_text().strip()}/stat"), time.monotonic() + 30
    with suppress(FileNotFoundError, ProcessLookupError):
        while state.read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}:
            assert time.monotonic() < end, "the command's child lives on"
            time.sleep(0.01)


@pytest.mark.parametrize("answer", ["", "{}", "null", '{"decision":"accept"}', "yes"])
def test_a_command_that_says_nonsense_is_refused(request_: Request, tmp_path: Path, answer: str) -> None:
    liar = tmp_path / "liar"
    liar.write_text(f"#!/bin/sh\necho '{answer}'\n")
    liar.chmod(0o755)

    with pytest.raises(ArtifactError):
        validate(request_, Transport(name="cli", command=(str(liar),)))


def test_an_admission_of_something_else_is_refused(request_: Request) -> None:
    admission = decide(request_)

    assert admission == check(admission, request_)
    for change in (
        {"path": "/other"},
        {"bytes": 1},
        {"sha256": "sha256:" + "0" * 64},
        {"worker": "1"},
        {"validation": attrs.evolve(admission.validation, record="/other")},
        {"validation": attrs.evolve(admission.validation, size=1)},
    ):
        with pytest.raises(IntegrityError, match=r"rule validation\.7"):
            check(attrs.evolve(admission, **change), request_)


# The service


def exchange(path: Path, data: bytes) -> dict:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(str(path))
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return json.loads(b"".join(iter(lambda: connection.recv(1 << 16), b"")))


def call(request: Request, token: str, **changes: object) -> bytes:
    options = {
        "path": request.path,
        "record": request.record,
        "expected_sha256": request.expected_sha256,
        "expected_bytes": request.expected_bytes,
    }
    return canonical.encode({"format": 1, "id": "0" * 32, "token": token, "options": options, **changes}) + b"\n"


def test_the_service_answers_only_its_token(request_: Request, rpc: Transport) -> None:
    token = rpc.rpc_token_file.read_text().strip()

    assert exchange(rpc.rpc_socket, call(request_, token))["ok"]
    answer = exchange(rpc.rpc_socket, call(request_, "x" * 43))
    assert not answer["ok"]
    assert "unauthorized" == answer["error"]["reason"]
    assert token not in json.dumps(answer)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"{}\n",
        b"null\n",
        b"\xff\xff\n",
        b'{"format":2}\n',
        b"{" * 1000 + b"\n",
        b"x" * (service.MAX_MESSAGE_BYTES + 2),
        b'{"format":1}',
    ],
)
def test_nonsense_costs_its_own_connection_only(request_: Request, rpc: Transport, data: bytes) -> None:
    try:
        answer = exchange(rpc.rpc_socket, data)
        assert "invalid_request" == answer["error"]["reason"]
    except (ConnectionResetError, BrokenPipeError, json.JSONDecodeError):
        assert len(data) > service.MAX_MESSAGE_BYTES
    assert validate(request_, rpc).bytes == request_.expected_bytes


def test_the_service_names_the_reason_of_a_refusal(request_: Request, made, rpc: Transport) -> None:
    token = rpc.rpc_token_file.read_text().strip()
    options = json.loads(call(request_, token))["options"]
    reasons = {}
    for name, change in (
        ("elsewhere", {"record": "/tmp/record"}),
        ("relative", {"path": "pack", "record": "pack.coldsnap-validation.json"}),
        ("size", {"expected_bytes": 7}),
        ("digest", {"expected_sha256": "sha256:" + "0" * 64}),
        ("missing", {"path": "/nonexistent", "record": "/nonexistent.coldsnap-validation.json"}),
    ):
        answer = exchange(rpc.rpc_socket, call(request_, token, options={**options, **change}))
        reasons[name] = answer["error"]["reason"]
    Path(request_.record).touch(mode=0o644)
    reasons["record"] = exchange(rpc.rpc_socket, call(request_, token))["error"]["reason"]

    assert {
        "elsewhere": "invalid_request",
        "relative": "invalid_request",
        "size": "size_mismatch",
        "digest": "digest_mismatch",
        "missing": "unusable_path",
        "record": "record_unreadable",
    } == reasons


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_uid_is_refused_by_the_file_mode_and_by_the_service(request_: Request) -> None:
    script = (
        "import contextlib, os, socket, sys\n"
        "os.setresuid(65534, 65534, 65534)\n"
        "connection = socket.socket(socket.AF_UNIX)\n"
        "connection.connect(sys.argv[1])\n"
        "with contextlib.suppress(OSError):\n"  # whom it refuses the service may hang up on before it was asked
        "    connection.sendall(sys.argv[2].encode())\n"
        "    connection.shutdown(socket.SHUT_WR)\n"
        "print(connection.recv(65536).decode())\n"
    )
    # The directory must be reachable for others, or the socket's own mode would never be asked.
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o711)
        token = write_token(directory / "token")
        with ValidationService(directory / "v.sock", directory / "token"):
            arguments = [sys.executable, "-c", script, str(directory / "v.sock"), call(request_, token).decode()]
            by_mode = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
            (directory / "v.sock").chmod(0o666)
            by_service = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)

    assert "PermissionError" in by_mode.stderr
    answer = json.loads(by_service.stdout)
    assert not answer["ok"]
    assert "unauthorized" == answer["error"]["reason"]
    assert "validation.8" in answer["error"]["message"]


def test_a_token_is_private_and_long_enough(tmp_path: Path, request_: Request) -> None:
    path = tmp_path / "weak"
    for content, mode, rule in (
        ("short", 0o600, "validation.9"),
        ("with white space in it", 0o600, "validation.9"),
        ("x" * 5000, 0o600, "validation.9"),
        ("x" * 32, 0o640, "evidence.3"),
    ):
        path.write_text(content)
        path.chmod(mode)
        with pytest.raises(FormatError) as caught:
            ValidationService(tmp_path / "w.sock", path)
        assert rule == caught.value.rule
    with pytest.raises(FileExistsError):
        write_token(path)


def test_a_service_replaces_a_stale_socket_and_never_a_living_one(tmp_path: Path, rpc: Transport) -> None:
    with pytest.raises(ArtifactError, match="already listens"):
        ValidationService(rpc.rpc_socket, rpc.rpc_token_file)
    stale = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(stale))
    ValidationService(stale, rpc.rpc_token_file).close()
    assert not stale.exists()
    stale.touch()
    with pytest.raises(ArtifactError, match="not a socket"):
        ValidationService(stale, rpc.rpc_token_file)
    with pytest.raises(ValueError, match="1 to 64"):
        ValidationService(tmp_path / "x.sock", rpc.rpc_token_file, concurrency=65)


def test_a_client_has_a_deadline_and_names_an_absent_service(tmp_path: Path, request_: Request) -> None:
    write_token(tmp_path / "token2")
    transport = Transport(
        name="rpc", rpc_socket=tmp_path / "mute.sock", rpc_token_file=tmp_path / "token2", timeout_s=0.3
    )
    with pytest.raises(ArtifactError, match="cannot be used"):
        validate(request_, transport)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute.sock"))
        mute.listen()
        with pytest.raises(ArtifactError, match=r"did not answer within 0\.3 s"):
            validate(request_, transport)


def test_a_deadline_is_that_of_the_whole_answer(tmp_path: Path, request_: Request) -> None:
    write_token(tmp_path / "token2")
    place = tmp_path / "slow.sock"
    over = threading.Event()
    with socket.socket(socket.AF_UNIX) as slow:
        slow.bind(str(place))
        slow.listen()

        def dribble() -> None:
            peer, _ = slow.accept()
            with peer, suppress(OSError):
                while not over.wait(0.05):
                    peer.sendall(b" ")

        thread = threading.Thread(target=dribble)
        thread.start()
        try:
            with pytest.raises(ArtifactError, match=r"did not answer within 0\.3 s"):
                validate(
                    request_, Transport(name="rpc", rpc_socket=place, rpc_token_file=tmp_path / "token2", timeout_s=0.3)
                )
        finally:
            over.set()
            thread.join()


def test_many_clients_at_once_get_their_answers(request_: Request, rpc: Transport) -> None:
    answers: list[Admission] = []
    threads = [threading.Thread(target=lambda: answers.append(validate(request_, rpc))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert 12 == len(answers)
    assert 1 == len({record.write_object(answer)["sha256"] for answer in answers})


def test_the_example_service_serves(tmp_path: Path, request_: Request) -> None:
    served = subprocess.Popen(
        [
            *(sys.executable, str(EXAMPLES / "serve_validation.py")),
            *("--socket", str(tmp_path / "e.sock"), "--token-file", str(tmp_path / "etoken")),
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": SOURCE},
        text=True,
    )
    try:
        assert "listening" in served.stdout.readline()
        transport = Transport(rpc_socket=tmp_path / "e.sock", rpc_token_file=tmp_path / "etoken", timeout_s=30)
        assert request_.expected_bytes == validate(request_, transport).bytes
    finally:
        served.terminate()
        served.wait(20)
        served.stdout.close()
