"""The in-rank side that every engine shares: the private control socket, the directive and the reseeding.

A rank is a process of an engine that loaded the plugin. It listens on ``control/<role>.<pid>.sock`` beside its
directive and answers one request per connection, from its own user only. After a restore it *adopts*: reads the
directive again, takes the new incarnation and reseeds what the user did not seed.

The one rule: nothing here can be left half open across a process image. The rank closes every connection before its
caller does, keeps no file open but the listening socket, and remembers nothing that it cannot read again from the
directive.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from coldsnap.engines.freshness import freshen
from coldsnap.engines.tidying import tidy
from coldsnap.errors import ColdSnapError, ContractError, PayloadMissingError
from coldsnap.keeper.directive import PLUGIN_ABI, Directive, read_directive

__all__ = ["MESSAGE_BYTES", "Busy", "Operation", "Rank", "reseed"]

Reply: TypeAlias = Mapping[str, Any]
Operation: TypeAlias = Callable[[Mapping[str, Any]], Reply]

MESSAGE_BYTES = 64 << 10

# What any rank may be asked; only the rank that owns the front end can do it, the others say that they skipped it.
FRONT_END_OPS = ("quiesce", "resume", "reset_prefix_cache", "status")
# The same for those that hold preserved memory.
WORKER_OPS = ("release", "hydrate", "memory", "materialize", "startup", "loaded", "digests", "load_report")

_SUN_PATH_BYTES = 107  # sockaddr_un(7): 108 with the NUL
_UCRED = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED, unix(7)
_REQUEST_TIMEOUT_S = 5.0


class Busy(Exception):  # a state, not a failure of the rank
    """An operation cannot be done in the present state; the message is sent to the caller."""


class Rank:
    """One process of an engine, seen from inside.

    Attributes:
        role: ``api``, ``engine`` or ``worker``.
        directive: The directive adopted last.
    """

    role: str
    directive: Directive

    def __init__(
        self,
        role: str,
        directive_path: str,
        *,
        engine: str,
        versions: Mapping[str, str],
        operations: Mapping[str, Operation] | None = None,
    ) -> None:
        self.role = role
        self.directive_path = directive_path
        self.directive = _own(read_directive(directive_path))
        self.engine = engine
        self.versions = dict(versions)
        self._operations: dict[str, Operation] = {
            "ping": self.ping,
            "adopt": self.adopt,
            "tidy": tidy,
            **(operations or {}),
        }
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Listen, acknowledge the directive, and say so in the log.

        Raises:
            ContractError: The directive is for another plugin, or the socket's path is too long for the kernel.
        """
        directory = os.path.dirname(self.directive_path)
        path = os.path.join(directory, "control", f"{self.role}.{os.getpid()}.sock")
        if len(os.fsencode(path)) > _SUN_PATH_BYTES:
            # CRIU binds the socket again by this very path, so that a detour through /proc/self/fd is no way out.
            raise ContractError(
                f"the control socket {path} has more than {_SUN_PATH_BYTES} bytes; use a shorter run_dir"
            )
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of an earlier process with this pid, in a namespace that is gone
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(16)
        self._listener = listener
        os.register_at_fork(after_in_child=self._forget)
        self._acknowledge(())
        threading.Thread(target=self._serve, args=(listener,), name="coldsnap-control", daemon=True).start()
        self.log(f"listening, incarnation {self.directive.incarnation}, {_age_s():.1f} s after its process began")

    def close(self) -> None:
        """Listen no longer; the socket's name goes too."""
        if self._listener is None:
            return
        with contextlib.suppress(OSError):
            os.unlink(self._listener.getsockname())
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept()
        self._forget()

    def log(self, message: str) -> None:
        """Write one line to the engine's log."""
        # One write for a whole line: the processes of an engine share their log.
        sys.stderr.write(f"[coldsnap] {self.role} {os.getpid()}: {message}\n")
        sys.stderr.flush()

    # Operations of every rank.

    def ping(self, _request: Mapping[str, Any]) -> Reply:
        """Say who this is."""
        return {
            "pid": os.getpid(),
            "role": self.role,
            "incarnation": self.directive.incarnation,
            "plugin_abi": PLUGIN_ABI,
            "engine": self.engine,
            "versions": self.versions,
        }

    def adopt(self, request: Mapping[str, Any]) -> Reply:
        """Take the incarnation that the directive now names; reseed, but not the generators that the user seeded."""
        self.directive = _own(read_directive(self.directive_path))
        reseeded = reseed(int(self.directive.seed, 16)) if request.get("reseed", True) is True else ()
        reseeded += freshen()
        self._acknowledge(reseeded)
        self.log(f"adopted incarnation {self.directive.incarnation}, reseeded {', '.join(reseeded) or 'nothing'}")
        return {"incarnation": self.directive.incarnation, "reseeded": list(reseeded)}

    def _acknowledge(self, reseeded: tuple[str, ...]) -> None:
        path = os.path.join(os.path.dirname(self.directive_path), "ack", f"{os.getpid()}.json")
        data = json.dumps({**self.ping({}), "reseeded": list(reseeded)}, sort_keys=True).encode()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, data)  # one write, below a page: a reader on tmpfs sees nothing or all of it
        finally:
            os.close(fd)

    # The server.

    def _forget(self) -> None:
        # A forked child has the listening socket but not the thread; a caller that reached it would wait for ever.
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed: the process ends
            # A thread for each request, so that `resume` gets through while `quiesce` waits.
            threading.Thread(target=self._converse, args=(connection,), name="coldsnap-request", daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_REQUEST_TIMEOUT_S)
            connection.send(_encode(self._answer(connection)))

    def _answer(self, connection: socket.socket) -> Reply:
        uid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1]
        if uid not in (os.geteuid(), 0):
            return _refusal("peer", f"the caller has uid {uid}, this rank serves uid {os.geteuid()} only")
        try:
            request = json.loads(connection.recv(MESSAGE_BYTES))
            return self.answer(request)
        except (ValueError, UnicodeDecodeError) as error:
            return _refusal("format", f"expected one JSON object: {error}")

    def answer(self, request: object) -> Reply:
        """Answer one decoded request; failures become replies, never exceptions."""
        if not isinstance(request, dict) or not isinstance(op := request.get("op"), str):
            return _refusal("format", "expected a JSON object with a string under 'op'")
        operation = self._operations.get(op)
        if operation is None:
            known = op in FRONT_END_OPS + WORKER_OPS
            return {"ok": True, "skipped": True} if known else _refusal("format", f"unknown operation {op!r}")
        try:
            return {"ok": True, **operation(request)}
        except Busy as error:
            return _refusal("state", str(error))
        except PayloadMissingError as error:
            return {**_refusal("missing", str(error)), "digest": error.digest}
        except ColdSnapError as error:
            return _refusal("format", str(error))
        except OSError as error:
            return _refusal("os", f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001  # an engine may raise anything; the caller must hear of it
            return _refusal("engine", f"{type(error).__name__}: {error}")


def reseed(seed: int) -> tuple[str, ...]:
    """Seed the global generators that exist in this process.

    Every rank of an engine gets the same seed: tensor-parallel ranks sample the same token only because their
    generators agree.

    Args:
        seed: 64 bits.

    Returns:
        The names of the generators seeded.
    """
    random.seed(seed)
    done = ["random"]
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32])
        done.append("numpy")
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)  # every device too, once it is initialised
        done.append("torch")
        if torch.cuda.is_initialized():
            done.append("torch.cuda")
    return tuple(done)


def _age_s() -> float:
    """Return how long ago this process began: for a rank that has just come up, what its imports took."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])  # starttime, proc_pid_stat(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _own(directive: Directive) -> Directive:
    if directive.plugin_abi != PLUGIN_ABI:
        raise ContractError(f"the directive is for plugin ABI {directive.plugin_abi}, this rank has {PLUGIN_ABI}")
    return directive


def _refusal(kind: str, sentence: str) -> Reply:
    return {"ok": False, "kind": kind, "error": sentence}


def _encode(reply: Reply) -> bytes:
    data = json.dumps(reply, sort_keys=True).encode()
    if len(data) > MESSAGE_BYTES:
        return json.dumps(_refusal("format", f"the reply has {len(data)} bytes, at most {MESSAGE_BYTES} fit")).encode()
    return data
