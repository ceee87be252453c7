"""``ReferenceEngine``: a small real engine with the interface of ``VLLM``, ready in about two seconds.

The one rule: whatever is tested with it is tested for real; it has processes, threads, shared memory, sockets and
torch weights, and no shortcut around the keeper, the directive or the control sockets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self

from attrs import field, frozen

from coldsnap.artifact.canonical import digest, sha256_of
from coldsnap.engines import acceptance
from coldsnap.engines.acceptance import Answer, Question
from coldsnap.engines.base import LaunchCommand, MemoryProviderName
from coldsnap.engines.endpoint import UNWATCHED, Watch
from coldsnap.engines.environment import EngineEnvironment, inspect_environment
from coldsnap.engines.model import ModelIdentity
from coldsnap.engines.specs import register
from coldsnap.engines.start_files import header_of
from coldsnap.errors import AdmissionError, UnsupportedError
from coldsnap.keeper.directive import Endpoint

__all__ = ["ReferenceEngine"]


def _own(value: Mapping[str, str]) -> Mapping[str, str]:
    return dict(value)


WEIGHTS_FILE = "weights.safetensors"


def _words(args: Iterable[str]) -> tuple[str, ...]:
    return tuple(args)


@register
@frozen(kw_only=True)
class ReferenceEngine:
    """A small torch server.

    Attributes:
        python: The interpreter of an environment with torch and coldsnap.
        model: The name it serves its model under.
        weights_seed: What the weights are drawn from; it decides every answer.
        weights_bytes: How much memory they take.
        weights: A safetensors file (:func:`coldsnap.testing.checkpoint.write_checkpoint` makes one) that the weights
            are loaded from instead, into memory that can be released; the KV cache is there too.
        kv_bytes: The size of that KV cache.
        loopback: Whether the two processes also hold an established TCP pair.
        seed: The user's seed for sampling, or ``None``; like an engine's ``--seed``.
        args: Further arguments.
        env: Environment on top of the caller's.
        cwd: Working directory.
    """

    kind: ClassVar[str] = "reference"
    names_workers: ClassVar[bool] = False
    start_load_format: ClassVar[Literal["coldsnap"] | None] = "coldsnap"
    distribution: ClassVar[str] = "torch"
    world_size: ClassVar[int] = 1
    tensor_parallel_size: ClassVar[int] = 1
    pipeline_parallel_size: ClassVar[int] = 1

    python: str = field(factory=lambda: sys.executable)
    model: str = "reference"
    weights_seed: int = 0
    weights_bytes: int = 1 << 20
    weights: str | None = None
    kv_bytes: int = 1 << 20
    loopback: bool = False
    seed: int | None = None
    args: tuple[str, ...] = field(default=(), converter=_words)
    env: Mapping[str, str] = field(factory=dict, converter=_own, hash=False)
    cwd: str = "/"

    @property
    def served_model(self) -> str:
        """Return the name under which the engine serves its model."""
        return self.model

    @property
    def user_seeded(self) -> bool:
        """Return whether the user chose a seed."""
        return self.seed is not None

    @property
    def imported(self) -> tuple[str, ...]:
        """Return what takes time to import; its worker has it when it is forked (``--fork``)."""
        return ("coldsnap.testing.reference_server", "torch", "numpy")

    @property
    def imported_environment(self) -> Mapping[str, str]:
        """Return nothing: a start method is an argument here, or there is no such template."""
        return {}

    @property
    def exports(self) -> bool:
        """Return whether its weights come from a checkpoint."""
        return self.weights is not None

    def start_files(self, environ: Mapping[str, str]) -> Mapping[str, bytes]:  # noqa: ARG002  nothing depends on it
        """Read the header of the checkpoint, which has the shapes.

        Raises:
            AdmissionError: It cannot be read.
        """
        return {WEIGHTS_FILE: header_of(Path(self.weights or ""))}

    def checkpoint(self, environ: Mapping[str, str]) -> str:  # noqa: ARG002
        """Return the file of the checkpoint."""
        return os.path.abspath(self.weights or "")

    def with_start_files(self, argv: Sequence[str], directory: str) -> tuple[str, ...]:
        """Return the command with another ``--weights``."""
        placed = list(argv)
        placed[placed.index("--weights") + 1] = f"{directory}/{WEIGHTS_FILE}"
        return tuple(placed)

    def eager(self) -> Self:
        """Return the same engine: it has no graphs."""
        return self

    def memory_provider(self, *, gpu: bool = False) -> MemoryProviderName | None:  # noqa: ARG002
        """Return ``host`` when its weights come from a checkpoint: they then lie in memory that can be released."""
        return "host" if self.weights else None

    def refusals(self, *, gpu: bool = False) -> tuple[UnsupportedError, ...]:
        """Refuse GPUs; everything else can be captured."""
        if gpu:
            return (
                UnsupportedError("the reference engine has no GPU code", field="placement.devices", works="no devices"),
            )
        return ()

    def identify(self, environ: Mapping[str, str]) -> ModelIdentity:  # noqa: ARG002  nothing depends on it
        """Return what the model is: its checkpoint, or a function of seed and size.

        Raises:
            AdmissionError: The checkpoint cannot be read.
        """
        revision = digest({"seed": self.weights_seed, "bytes": self.weights_bytes})
        if self.weights is not None:
            try:
                revision = sha256_of(Path(self.weights).read_bytes())
            except OSError as error:
                raise AdmissionError(f"the checkpoint {self.weights} cannot be read: {error.strerror}") from error
        return ModelIdentity(kind="local", model=self.model, revision=revision, architecture="Reference")

    def require_model(self, environ: Mapping[str, str]) -> None:
        """Refuse nothing: there are no files."""

    def inspect(self, environ: Mapping[str, str], *, timeout_s: float = 30.0) -> EngineEnvironment:
        """Ask the interpreter what it has installed.

        Raises:
            AdmissionError: The interpreter is missing, or lacks torch or this very coldsnap.
        """
        env = {**environ, **self.env}
        return inspect_environment(
            self.python, engine=("torch",), others=("numpy",), environ=env, cwd=self.cwd, timeout_s=timeout_s
        )

    def admit(self, environment: EngineEnvironment) -> None:
        """Accept every torch."""

    def launch_command(
        self,
        endpoint: Endpoint,
        *,
        environ: Mapping[str, str],
        gpu: bool = False,  # noqa: ARG002
    ) -> LaunchCommand:
        """Return what the keeper starts."""
        argv = [self.python, "-m", "coldsnap.testing.reference_server", "--model", self.model]
        argv += ["--host", endpoint.host, "--port", str(endpoint.port), "--weights-seed", str(self.weights_seed)]
        argv += ["--weights-bytes", str(self.weights_bytes)]
        argv += ["--weights", self.weights, "--kv-bytes", str(self.kv_bytes)] if self.weights else []
        argv += ["--loopback"] if self.loopback else []
        argv += ["--seed", str(self.seed)] if self.seed is not None else []
        return LaunchCommand(argv=(*argv, *self.args), env={**environ, **self.env}, cwd=self.cwd)

    def installed_arguments(
        self,
        argv: Sequence[str],  # noqa: ARG002
        environment: EngineEnvironment,  # noqa: ARG002
        *,
        environ: Mapping[str, str],  # noqa: ARG002
    ) -> tuple[str, ...]:
        """Return nothing: all that it needs is torch."""
        return ()

    def roles(
        self,
        *,
        gpu: bool = False,  # noqa: ARG002
        environment: EngineEnvironment | None = None,  # noqa: ARG002
    ) -> Mapping[str, int]:
        """Return how many ranks of each role listen once it is ready."""
        return {"api": 1, "worker": 1}

    def ready_path(self, environment: EngineEnvironment, *, closed: bool) -> str | None:  # noqa: ARG002
        """Return where the server says that it can serve."""
        return "/health"

    def ask(
        self,
        endpoint: Endpoint,
        question: Question,
        *,
        timeout_s: float,
        request_id: str = "",
        watch: Watch = UNWATCHED,
    ) -> Answer:
        """Put a question to the running server.

        Raises:
            EngineError: It ended, refused, broke off or took too long.
        """
        return acceptance.ask(
            endpoint, question, model=self.served_model, timeout_s=timeout_s, request_id=request_id, watch=watch
        )
