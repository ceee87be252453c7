"""What ``execute`` knows of an engine, whichever it is.

::

    spec.refusals(gpu=…)                      pure: what this library cannot do with what the user wrote
    spec.memory_provider(gpu=…)               pure: whether its weights can leave the process
    spec.identify(environ)                    reads the model's files: what exactly is being served
    inspect_environment(spec.python, …)       one short process: what the engine's interpreter has installed
    spec.admit(environment)                   refuses an environment that cannot be captured
    spec.launch_command(endpoint, …)          what the keeper starts
    await_ready(endpoint, …)                  port, then health, the keeper's word between two polls
    Ranks(keeper.rank_dir).require(spec.roles(…))
    .quiesce() … .adopt() .resume() .reset_prefix_cache()
    spec.ask(endpoint, question, …)           and ``compare``

The one rule: a specification is frozen data. Everything that runs belongs to the keeper, everything that is asked goes
to a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

from attrs import frozen

from coldsnap.engines.acceptance import Answer, Question
from coldsnap.engines.endpoint import UNWATCHED, Watch
from coldsnap.engines.environment import EngineEnvironment
from coldsnap.engines.model import ModelIdentity
from coldsnap.errors import AdmissionError, UnsupportedError
from coldsnap.keeper.directive import Endpoint

__all__ = ["Engine", "LaunchCommand", "MemoryProviderName", "StartsFromPacks", "raise_refusals"]

MemoryProviderName: TypeAlias = Literal["host", "cuda"]


@frozen(kw_only=True)
class LaunchCommand:
    """What starts an engine.

    Attributes:
        argv: The command.
        env: Its whole environment, but for what the keeper adds (directive, TMPDIR).
        cwd: Its working directory.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str


@runtime_checkable
class Engine(Protocol):
    """A specification of an engine: ``VLLM``, ``SGLang``, or the reference engine of the tests."""

    kind: ClassVar[str]
    names_workers: ClassVar[bool]
    """Whether each of several workers says which one it is, so that their weights can leave one by one."""
    python: str
    model: str
    args: tuple[str, ...]

    @property
    def distribution(self) -> str:
        """Return the name of the distribution whose version is the engine's."""

    @property
    def served_model(self) -> str:
        """Return the name under which the engine serves its model."""

    @property
    def world_size(self) -> int:
        """Return the number of ranks that hold a share of the model."""

    @property
    def tensor_parallel_size(self) -> int:
        """Return over how many ranks each layer is spread."""

    @property
    def pipeline_parallel_size(self) -> int:
        """Return over how many stages the layers are spread."""

    @property
    def user_seeded(self) -> bool:
        """Return whether the user chose a seed; generators are then left alone after a restore."""

    @property
    def imported(self) -> tuple[str, ...]:
        """Return the modules that an ``imported`` template loads before it stops; empty where there is none.

        The first is the one that the command runs (``python -m``).
        """

    @property
    def imported_environment(self) -> Mapping[str, str]:
        """Return names with which the processes of such a template inherit its imports."""

    def eager(self) -> Engine:
        """Return the same engine without CUDA graphs."""

    def memory_provider(self, *, gpu: bool) -> MemoryProviderName | None:
        """Return whose allocations its weights can lie in, ``None`` when in nobody's.

        A provider's allocations keep their addresses while their contents go and come back. Launched with
        ``specs.RELEASING`` in its environment, its ranks answer ``release``, ``hydrate`` and ``memory``.

        Args:
            gpu: Whether it is placed on a GPU.
        """

    def refusals(self, *, gpu: bool) -> tuple[UnsupportedError, ...]:
        """Return what this library cannot do with this specification, without looking at the machine."""

    def identify(self, environ: Mapping[str, str]) -> ModelIdentity:
        """Read what the model is.

        Args:
            environ: The environment to start from.

        Raises:
            AdmissionError: Its files are missing or not those of a model that can be captured.
        """

    def require_model(self, environ: Mapping[str, str]) -> None:
        """Refuse a model that is plainly not there: what takes a millisecond to see, before anything is started.

        Args:
            environ: As for :meth:`identify`.

        Raises:
            AdmissionError: As for :meth:`identify`.
        """

    def inspect(self, environ: Mapping[str, str], *, timeout_s: float = 30.0) -> EngineEnvironment:
        """Ask the engine's interpreter what it has installed.

        Raises:
            AdmissionError: The interpreter is missing, or lacks the engine or this very coldsnap.
        """

    def admit(self, environment: EngineEnvironment) -> None:
        """Check that the engine in an environment has the structure that the plugin relies on.

        Raises:
            ContractError: With everything that is missing.
        """

    def launch_command(self, endpoint: Endpoint, *, environ: Mapping[str, str], gpu: bool) -> LaunchCommand:
        """Return what the keeper starts.

        Args:
            endpoint: Where the engine is to listen.
            environ: The environment to start from; what the engine needs is added to it.
            gpu: Whether it is placed on a GPU.
        """

    def installed_arguments(
        self, argv: Sequence[str], environment: EngineEnvironment, *, environ: Mapping[str, str]
    ) -> tuple[str, ...]:
        """Return further arguments of a launch that depend on what the interpreter has installed.

        Args:
            argv: The command so far.
            environment: What is installed.
            environ: The environment of the launch.
        """

    def roles(self, *, gpu: bool, environment: EngineEnvironment | None = None) -> Mapping[str, int]:
        """Return how many ranks of each role listen once the engine is ready.

        Args:
            gpu: Whether it is placed on a GPU.
            environment: What its interpreter has installed: releases may load plugins in more processes than others.
        """

    def ready_path(self, environment: EngineEnvironment, *, closed: bool) -> str | None:
        """Return the path that answers 200 when the engine serves, ``None`` where only its ranks can tell.

        Args:
            environment: What its interpreter has installed.
            closed: Its door is closed, and stays so until a restored engine has answered as it did: the path then
                tells that its front end runs.
        """

    def ask(
        self,
        endpoint: Endpoint,
        question: Question,
        *,
        timeout_s: float,
        request_id: str = "",
        watch: Watch = UNWATCHED,
    ) -> Answer:
        """Put a question to the running engine.

        Raises:
            EngineError: It ended, refused, broke off or took too long.
        """


@runtime_checkable
class StartsFromPacks(Engine, Protocol):
    """An engine whose ranks export what a load leaves, and can be started anew from it (``docs/starting.md``)."""

    start_load_format: ClassVar[Literal["coldsnap"] | None]
    """What its command says to load with when the load is ordered; None: the directive alone says so."""

    @property
    def exports(self) -> bool:
        """Return whether this specification can: whether there is a checkpoint at all."""

    def start_files(self, environ: Mapping[str, str]) -> Mapping[str, bytes]:
        """Read what it needs to start besides tensors.

        Args:
            environ: As for :meth:`identify`.

        Raises:
            AdmissionError: A file is missing or cannot be read.
        """

    def checkpoint(self, environ: Mapping[str, str]) -> str:
        """Return where its tensors are, absolute.

        Args:
            environ: As for :meth:`identify`.
        """

    def with_start_files(self, argv: Sequence[str], directory: str) -> tuple[str, ...]:
        """Return its command with a directory of start files in place of the model.

        Args:
            argv: What :meth:`launch_command` returned, perhaps with more at the end.
            directory: Where the files are, inside the process.
        """


def raise_refusals(what: str, refusals: Sequence[AdmissionError]) -> None:
    """Raise nothing, the only refusal, or one AdmissionError with every refusal.

    Raises:
        AdmissionError: At least one refusal.
    """
    if len(refusals) == 1:
        raise refusals[0]
    if refusals:
        raise AdmissionError(f"{what} cannot be captured:", [str(refusal) for refusal in refusals])
