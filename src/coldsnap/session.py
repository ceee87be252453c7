"""What one execution holds on to: the keeper, the artifact in the making, and what earlier steps found out.

The one rule: everything acquired is released by ``close``, in reverse order, and the first thing that a failure does is
the one that keeps the workload alive.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, TypeVar

from attrs import define, field, frozen

from coldsnap.artifact import Artifact, ArtifactWriter, CacheSeed, FileRecord, Weights
from coldsnap.artifact.tree import Tree
from coldsnap.describe import short_name
from coldsnap.drivers.cuda import CudaHelper
from coldsnap.drivers.n610 import DumpedTree, StagedTree, ThawedTree
from coldsnap.drivers.page_images import ShrunkPages
from coldsnap.engines.acceptance import Answer, Question
from coldsnap.engines.base import Engine
from coldsnap.engines.control import Ranks
from coldsnap.engines.endpoint import Watch
from coldsnap.engines.environment import EngineEnvironment
from coldsnap.engines.model import ModelIdentity
from coldsnap.errors import ColdSnapError
from coldsnap.host.facts import HostFacts
from coldsnap.keeper.client import Interpreter, Keeper
from coldsnap.keeper.directive import Endpoint, read_directive
from coldsnap.keeper.rundir import is_full
from coldsnap.keeper.tree import KILL_TIMEOUT_S
from coldsnap.keeper.undo import KEPT, STAYS_CLOSED
from coldsnap.plan import Plan
from coldsnap.receipts import Report
from coldsnap.transfer.native import NativeLibrary, packaged
from coldsnap.transfer.prefetch import Prefetch

__all__ = ["Released", "Session"]

T = TypeVar("T")


@frozen(kw_only=True)
class Released:
    """What one worker wrote when it gave its memory away.

    Attributes:
        rank: ``role.pid``.
        directory: Of residual and manifests, in the artifact.
        manifest_sha256: Digest of the native manifest.
        pack_sha256: Digest of the pack.
        pack_bytes: Its size.
        new_pack_bytes: How many of its bytes were not in the store before.
        residual_bytes: Size of the residual.
        seconds: How long it took, s.
    """

    rank: str
    directory: str
    manifest_sha256: str
    pack_sha256: str
    pack_bytes: int
    new_pack_bytes: int
    residual_bytes: int
    seconds: float


@define(kw_only=True)
class Session:
    """The state of one execution; steps fill it in, later steps read it.

    Attributes:
        plan: What runs.
        report: What is told afterwards.
        serving: Whether the engine was serving before: then a failure leaves it serving.
        keeper: The keeper, while an operation of this execution is in flight there.
        keeper_pid: Its pid as this process sees it, also after the hand-over; for fault points.
        interpreter: Waits to become the keeper, from before the admission; nothing is in it yet.
        interrupted: Whether the caller does not want to wait any more.
        released: By worker, what a capture has written outside the image.
        weights: The same in the format's words, once it is sealed.
        seeds: Derived caches that the artifact carries.
        prefetches: What is being read ahead.
        start_files: What an engine starts with that is started anew from packs.
        load_format: What its command said to load with, before the load was ordered.
        checkpoint: The files that the weights come from; empty while they come from packs or the image.
        capture_id: Of the artifact in the making.
        key: Lets the acceptance request of a restore in, before the engine is open to others.
    """

    plan: Plan
    report: Report
    serving: bool = False
    host: HostFacts | None = None
    keeper: Keeper | None = None
    keeper_pid: int | None = None
    interpreter: Interpreter | None = None
    interrupted: bool = False
    engine: Engine | None = None
    environment: EngineEnvironment | None = None
    model: ModelIdentity | None = None
    question: Question | None = None
    answer: Answer | None = None
    writer: ArtifactWriter | None = None
    dumped: DumpedTree | None = None
    shrunk: ShrunkPages | None = None
    sealed: tuple[FileRecord, ...] = ()
    released: Mapping[str, Released] = field(factory=dict)
    weights: Weights | None = None
    seeds: tuple[CacheSeed, ...] = ()
    prefetches: list[Prefetch] = field(factory=list)
    checkpoint: tuple[str, ...] = ()
    artifact: Artifact | None = None
    staged: StagedTree | None = None
    start_files: Tree | None = None
    load_format: str = ""
    thawed: ThawedTree | None = None
    cuda: CudaHelper | None = None
    capture_id: str = ""
    key: str = field(factory=lambda: secrets.token_hex(16))
    stack: ExitStack = field(factory=ExitStack)

    def need(self, value: T | None, what: str) -> T:
        """Return a value that an earlier step must have left.

        Raises:
            ColdSnapError: It did not: the plan was not made by this library's ``resolve``.
        """
        if value is None:
            raise ColdSnapError(f"the plan has no step before this one that gives {what}; make it with resolve()")
        return value

    def take(self, keeper: Keeper) -> Keeper:
        """Hold on to a keeper, and return it."""
        self.keeper, self.keeper_pid = keeper, keeper.keeper_pid
        return keeper

    def interrupt(self) -> None:
        """Let the waits of running steps come to an end."""
        self.interrupted = True

    def name_capture(self) -> str:
        """Return the name of the capture: the manifests of a release have it before the descriptor does."""
        if not self.capture_id:
            name = short_name(self.spec.model.rsplit("/", 1)[-1])
            self.capture_id = f"{name}-{time.time_ns() // 1_000_000:x}"
        return self.capture_id

    @property
    def living(self) -> Keeper:
        """Return the keeper."""
        return self.need(self.keeper, "a keeper")

    @property
    def spec(self) -> Engine:
        """Return the engine's specification."""
        return self.need(self.engine, "an engine")

    @property
    def ranks(self) -> Ranks:
        """Return the ranks of the engine."""
        return Ranks(self.living.rank_dir, ended=self.ended)

    @property
    def endpoint(self) -> Endpoint:
        """Return where the engine listens, as its directive says."""
        return read_directive(Path(self.living.rank_dir) / "directive.json").endpoint

    @property
    def gpu(self) -> bool:
        """Return whether the host has a GPU."""
        return bool(self.need(self.host, "the host's facts").gpus)

    @property
    def provider(self) -> Literal["image", "native", "recovery"]:
        """Return where the weights of the opened artifact come from, as its process image has or lacks them."""
        if self.plan.driver == "n580":
            return "image"  # until it is started, a template has nothing to fill
        if self.checkpoint:
            return "recovery"
        return "native" if self.need(self.artifact, "an artifact").descriptor.weights.kind == "packs" else "image"

    def ended(self) -> str | None:
        """Say how the engine ended, or None while it lives: what a wait looks at between two polls."""
        if self.interrupted:
            return "the caller was interrupted"
        status = self.living.status()
        if not status.loss and status.state in {"running", "stopped"}:
            return None
        full = "; the filesystem of its run directory is full" if is_full(self.living.run_dir) else ""
        return f"{status.loss or f'{status.state} ({status.exit})'}{full}"

    @property
    def library(self) -> NativeLibrary | None:
        """Return the native library that the policy names, its digest compared, or else that of this installation.

        Raises:
            NativeError: It is not there, or is another build.
        """
        named = {decision.name: decision.effective for decision in self.plan.decisions if decision.effective}
        path, sha256 = named.get("io.native_library"), named.get("io.native_sha256")
        return NativeLibrary.load(path, sha256=sha256) if path or sha256 else packaged()

    @property
    def watch(self) -> Watch:
        """Return what to look at while the engine is to answer."""
        return Watch(ended=self.ended, log=self.living.log_path)

    def undo(self) -> str:
        """Undo what is half done; return in one sentence what became of the workload."""
        keeper, self.keeper = self.keeper, None
        if keeper is None:
            return self._undo_hand_over()
        try:
            if self.cuda is not None:
                # First of all: processes that are locked or checkpointed cannot serve, whatever else is undone.
                bring_back(keeper, self.cuda)
            done = keeper.abort() if keeper.in_flight else ()
            status = keeper.status() if self.serving else None
            memory = self._told_of_memory(Ranks(keeper.rank_dir)) if self.plan.operation == "wake" else ""
            if not self.serving:
                self._await_end(keeper, undone=bool(done))  # until then processes and port are not free
        except (ColdSnapError, OSError) as error:
            return f"the keeper could not be reached to undo the operation: {error}"
        finally:
            keeper.close()
        kept = any(one.startswith(KEPT) for one in done)
        if kept and self.writer is not None:
            self.writer.leave()
        undone = "; ".join(done) or "nothing had to be undone"
        if status is None:
            return f"nothing is left running ({undone})"
        if status.loss:
            return f"the engine does not serve: {status.loss} ({undone})"
        if STAYS_CLOSED in done:
            todo = "put right what is missing and wake it (Wake), or stop it"
            closed = f"the engine is {status.state}, but its memory is not back, and its door stays closed"
            return f"{closed}; {todo} ({undone})"
        if memory:  # a wake has brought back what it could, and does not take that away again
            return f"the engine is {status.state}; {memory} ({undone})"
        return f"the engine is {status.state} as before ({undone})"

    @staticmethod
    def _told_of_memory(ranks: Ranks) -> str:
        """Say how memory and door are after a wake that failed."""
        try:
            states = {str(reply["state"]) for reply in ranks.memory().values()}
            is_open = bool(ranks.status()["open"])
        except (ColdSnapError, OSError) as error:
            return f"its ranks do not say how its memory is: {error}"
        if states <= {"awake"}:
            return "its memory is back" + ("" if is_open else ", but its door stays closed: wake it again (Wake)")
        return (
            f"its memory is {' and '.join(sorted(states))}, and its door stays closed; put right what is missing and "
            "wake it again (Wake)"
        )

    @staticmethod
    def _await_end(keeper: Keeper, *, undone: bool) -> None:
        if undone:
            keeper.wait(KILL_TIMEOUT_S)
        else:  # its operation never began, so nothing ends it but this
            keeper.stop(grace_s=0)

    def _undo_hand_over(self) -> str:
        """Stop an engine that this execution started and handed over: the error is all that the caller gets."""
        handle, told = self.report.engine, self.report.workload
        if handle is None or self.serving:
            return told or "nothing was started"
        self.report.engine = None
        handle.stop(grace_s=0)
        return "nothing is left running (the engine had been handed over already, and was stopped)"

    def close(self) -> None:
        """Release everything that the steps acquired."""
        self.stack.close()


def bring_back(keeper: Keeper, cuda: CudaHelper) -> None:
    """Have everything brought back that a CUDA helper has locked or checkpointed, in a tree that may stand still.

    Args:
        keeper: Of the tree.
        cuda: Its helper; closed afterwards.
    """
    if keeper.status().state == "stopped":
        # A thread of each process does it, for which the process must run; a dump leaves all of them stopped.
        keeper.signal(signal.SIGCONT, whom="tree")
    cuda.close()
