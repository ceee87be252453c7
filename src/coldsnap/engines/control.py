"""What a caller asks of the ranks of one engine.

The one rule: a rank that should be there and is not, or that answers for another incarnation, is an error: an
operation that reached only some of the ranks has not happened.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from coldsnap.engines.endpoint import POLL_INTERVAL_S, log_tail
from coldsnap.errors import EngineError, StepTimeout
from coldsnap.keeper.control import request_control, request_each

__all__ = ["RankAddress", "Ranks"]

_NAME = re.compile(r"(?P<role>[a-z]+)\.(?P<pid>[0-9]+)\.sock")
_STATUS_S = 2.0
_MARGIN_S = 5.0  # for the answer, on top of the time that an operation may take inside the rank


@frozen(order=True)
class RankAddress:
    """One control socket.

    Attributes:
        role: ``api``, ``engine`` or ``worker``.
        pid: In the engine's own pid namespace.
    """

    role: str
    pid: int

    def __str__(self) -> str:
        return f"{self.role}.{self.pid}"


@frozen
class Ranks:
    """The ranks of one engine.

    Attributes:
        directory: The directory of the directive, as the caller sees it (``Keeper.rank_dir``).
        ended: Looked at while answers are awaited; a sentence means that the engine, or a rank of it, is dead.
    """

    directory: str | os.PathLike[str]
    ended: Callable[[], str | None] = field(default=lambda: None, kw_only=True)

    def present(self) -> tuple[RankAddress, ...]:
        """Return every control socket there is, ordered by role and pid."""
        try:
            names = os.listdir(os.path.join(self.directory, "control"))
        except FileNotFoundError:
            return ()
        found = (_NAME.fullmatch(name) for name in names)
        return tuple(sorted(RankAddress(match["role"], int(match["pid"])) for match in found if match))

    def require(self, roles: Mapping[str, int]) -> tuple[RankAddress, ...]:
        """Return the ranks, after checking that each role has as many as expected.

        Args:
            roles: The number of processes of each role.

        Raises:
            EngineError: A role has more or fewer; the plugin was not loaded there.
        """
        ranks = self.present()
        found = {role: sum(rank.role == role for rank in ranks) for role in {*roles, *(rank.role for rank in ranks)}}
        wrong = [f"{found[role]} {role}, expected {roles.get(role, 0)}" for role in sorted(found)]
        if found != dict(roles):
            message = f"the engine has control sockets of {'; '.join(wrong)}: its plugin was not loaded everywhere"
            raise EngineError(f"{message}; look for 'coldsnap' in its log")
        return ranks

    def await_ready(self, *, timeout_s: float, closed: bool = False, log: Path | None = None) -> float:
        """Wait until the rank that owns the front end says that the engine serves.

        For engines without a path that says so without working for the answer.

        Args:
            timeout_s: How long to wait, s.
            closed: Whether a front end that runs behind its closed door is ready for what is to come.
            log: The engine's log, whose last lines go into the error.

        Returns:
            How long it took, s.

        Raises:
            EngineError: It ended, or did not serve in time.
        """
        start = time.monotonic()
        state = "no rank of its front end listens"
        while time.monotonic() - start < timeout_s:
            if reason := self.ended():
                raise EngineError(f"the engine ended while it was starting: {reason}", log_tail=log_tail(log))
            if any(rank.role == "api" for rank in self.present()):
                try:
                    told = self.status(timeout_s=_STATUS_S)
                    if told.get("ready") is True or (closed and told.get("open") is False):
                        return time.monotonic() - start
                    state = "its front end says that it is starting"
                except (EngineError, StepTimeout) as error:
                    state = str(error)
            time.sleep(POLL_INTERVAL_S)
        message = f"the engine was not ready within {timeout_s:g} s ({state}); allow more time or read its log"
        raise EngineError(message, log_tail=log_tail(log))

    def ping(self, *, timeout_s: float = 10.0) -> Mapping[str, Mapping[str, Any]]:
        """Ask every rank who it is.

        Returns:
            ``{"api.612": {"pid": …, "role": …, "incarnation": …, "plugin_abi": …, "engine": …, "versions": {…}}}``.

        Raises:
            EngineError: There is no rank, or one refused.
            StepTimeout: One did not answer.
        """
        return self._all("ping", timeout_s=timeout_s)

    def adopt(self, *, incarnation: str, reseed: bool = True, timeout_s: float = 30.0) -> tuple[str, ...]:
        """Let every rank take over the directive that was written last.

        Args:
            incarnation: What each must answer with.
            reseed: Whether the generators that the user did not seed get the directive's seed.
            timeout_s: For all, s.

        Returns:
            The ranks, as ``role.pid``.

        Raises:
            EngineError: There is no rank, one refused, or one adopted something else.
            StepTimeout: One did not answer.
        """
        replies = self._all("adopt", timeout_s=timeout_s, reseed=reseed)
        for rank, reply in replies.items():
            if (found := reply.get("incarnation")) != incarnation:
                raise EngineError(
                    f"{rank} adopted incarnation {found}, expected {incarnation}: it reads another directive"
                )
        return tuple(replies)

    def quiesce(self, *, timeout_s: float) -> float:
        """Let the engine accept no new work, and finish what runs.

        Args:
            timeout_s: How long the requests in flight may take, s.

        Returns:
            How long it took, s.

        Raises:
            EngineError: Requests still ran when the time was up (the engine then serves on), or it was resumed
            meanwhile. StepTimeout: It did not answer.
        """
        start = time.monotonic()
        self._front("quiesce", timeout_s=timeout_s + _MARGIN_S, drain_timeout_s=timeout_s)
        return time.monotonic() - start

    def tidy(self, *, timeout_s: float = 30.0) -> Mapping[str, Mapping[str, Any]]:
        """Have every rank give back memory that nothing uses; only while the engine is quiet.

        Returns:
            ``{"worker.640": {"freed": {"garbage": …, "heap": …}, "anonymous_bytes": …, "trims": …}}``.

        Raises:
            EngineError: There is no rank, or one could not.
            StepTimeout: One did not answer.
        """
        return self._all("tidy", timeout_s=timeout_s)

    def admit(self, key: str, *, timeout_s: float = 30.0) -> None:
        """Let a quiesced engine run for requests with ``key`` in their id alone; all others wait at the door.

        Raises:
            EngineError: It cannot.
            StepTimeout: It did not answer.
        """
        self._front("admit", timeout_s=timeout_s, key=key)

    def resume(self, *, timeout_s: float = 30.0) -> None:
        """Let the engine accept work again; harmless when it does.

        Raises:
            EngineError: It cannot.
            StepTimeout: It did not answer.
        """
        self._front("resume", timeout_s=timeout_s)

    def reset_prefix_cache(self, *, timeout_s: float = 30.0) -> None:
        """Empty the prefix cache, so that the next answer is computed from its first token on.

        Raises:
            EngineError: Requests in flight hold blocks of it.
            StepTimeout: It did not answer.
        """
        self._front("reset_prefix_cache", timeout_s=timeout_s)

    def memory(self, *, timeout_s: float = 30.0) -> Mapping[str, Mapping[str, Any]]:
        """Ask every rank that has memory that can be released how it is.

        Returns:
            ``{"worker.640": {"state": …, "worker": …, "regions": {…}, "generation": …}}``; empty when none has.

        Raises:
            EngineError: There is no rank, or one refused.
            StepTimeout: One did not answer.
        """
        replies = self._all("memory", timeout_s=timeout_s)
        return {rank: reply for rank, reply in replies.items() if not reply.get("skipped")}

    def workers(self, *, timeout_s: float = 30.0) -> Mapping[str, str]:
        """Return the worker behind each rank that has memory that can be released.

        Returns:
            ``{"worker.640": "worker-0"}``.

        Raises:
            EngineError: There is none, or several do not say which they are.
            StepTimeout: One did not answer.
        """
        found = {rank: str(reply.get("worker") or "") for rank, reply in self.memory(timeout_s=timeout_s).items()}
        if len(found) == 1:
            return {rank: worker or "worker-0" for rank, worker in found.items()}
        if not found:
            raise EngineError("no rank of the engine has memory that can be released: look for 'coldsnap' in its log")
        if not all(found.values()) or len(set(found.values())) != len(found):
            raise EngineError(f"the ranks {', '.join(sorted(found))} do not say which worker each of them is")
        return found

    def release(
        self, requests: Mapping[str, Mapping[str, Any]], *, timeout_s: float
    ) -> Mapping[str, Mapping[str, Any]]:
        """Have workers write their weights and give the memory away; only while the engine is quiet.

        Args:
            requests: By rank; docs/weights.md has the fields.
            timeout_s: For all, s.

        Raises:
            EngineError: One could not; what it has not given away is as before.
            StepTimeout: One did not answer.
        """
        return request_each(self.directory, "release", requests, timeout_s=timeout_s, ended=self.ended)

    def hydrate(
        self, requests: Mapping[str, Mapping[str, Any]], *, timeout_s: float
    ) -> Mapping[str, Mapping[str, Any]]:
        """Have workers map their memory again and fill it; what is awake stays as it is.

        Args:
            requests: By rank; docs/weights.md has the fields.
            timeout_s: For all, s.

        Raises:
            EngineError: One could not, or its bytes were not the captured ones.
            StepTimeout: One did not answer.
        """
        return request_each(self.directory, "hydrate", requests, timeout_s=timeout_s, ended=self.ended)

    def digests(self, *, timeout_s: float) -> Mapping[str, Mapping[str, str]]:
        """Have every rank that has a model digest each of its parameters and buffers.

        Args:
            timeout_s: For each page of the answer, s; a page is at most a few hundred tensors.

        Returns:
            ``{"worker.640": {"model.embed_tokens.weight": "<64 hex digits>"}}``; empty when no rank has a model.

        Raises:
            EngineError: There is no rank, or one refused.
            StepTimeout: One did not answer.
        """
        found: dict[str, dict[str, str]] = {}
        pages = self._all("digests", timeout_s=timeout_s)
        while pages := {rank: page for rank, page in pages.items() if not page.get("skipped")}:
            for rank, page in pages.items():
                found.setdefault(rank, {}).update(page["digests"])
            requests = {rank: {"first": page["next"]} for rank, page in pages.items() if page["next"] is not None}
            pages = request_each(self.directory, "digests", requests, timeout_s=timeout_s, ended=self.ended)
        return found

    def startup(self, *, timeout_s: float = 10.0) -> Mapping[str, Mapping[str, Any]]:
        """Ask every rank that may hold a worker what became of its startup plan (docs/caches.md).

        Raises:
            EngineError: There is no rank, or one refused.
            StepTimeout: One did not answer.
        """
        replies = self._all("startup", timeout_s=timeout_s)
        return {rank: reply for rank, reply in replies.items() if not reply.get("skipped")}

    def materialize(
        self, requests: Mapping[str, Mapping[str, Any]], *, timeout_s: float
    ) -> Mapping[str, Mapping[str, Any]]:
        """Have workers write their packs out of memory that is awake, while the engine serves.

        Args:
            requests: By rank; docs/materialize.md has the fields.
            timeout_s: For all answers, s; ``wait_s`` of a request says how long each may wait.

        Returns:
            ``{"worker.640": {"state": …, "sha256": …, "bytes": …, "new_bytes": …, "seconds": …, "error": …}}``.

        Raises:
            EngineError: One has not begun.
            StepTimeout: One did not answer.
        """
        return request_each(self.directory, "materialize", requests, timeout_s=timeout_s, ended=self.ended)

    def status(self, *, timeout_s: float = 10.0) -> Mapping[str, Any]:
        """Return ``unfinished`` and ``held`` (numbers of requests), ``open`` (the door) and ``quiesced``.

        Raises:
            EngineError: It cannot tell.
            StepTimeout: It did not answer.
        """
        return self._front("status", timeout_s=timeout_s)

    def load_report(self, *, timeout_s: float = 30.0) -> Mapping[str, Mapping[str, Any]]:
        """Ask every rank what a load that was ordered did (docs/starting.md).

        Returns:
            By rank, those that loaded a model; empty when none was told anything about its load.

        Raises:
            EngineError: There is no rank, or one refused.
            StepTimeout: One did not answer.
        """
        replies = self._all("load_report", timeout_s=timeout_s)
        return {rank: reply for rank, reply in replies.items() if not reply.get("skipped")}

    def _all(self, op: str, *, timeout_s: float, **arguments: Any) -> Mapping[str, Mapping[str, Any]]:
        replies = request_control(self.directory, op, timeout_s=timeout_s, ended=self.ended, **arguments)
        if not replies:
            raise EngineError(f"no rank listens below {self.directory}: the engine's plugin was not loaded")
        return replies

    def _front(self, op: str, *, timeout_s: float, **arguments: Any) -> Mapping[str, Any]:
        replies = request_control(self.directory, op, roles=["api"], timeout_s=timeout_s, ended=self.ended, **arguments)
        if len(replies) != 1:
            raise EngineError(f"expected one rank with the role api below {self.directory}, found {len(replies)}")
        return next(iter(replies.values()))
