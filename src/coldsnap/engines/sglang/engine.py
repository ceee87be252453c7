"""``SGLang``: what a user writes to have SGLang launched, captured and restored.

The one rule: nothing here imports SGLang. It runs in an interpreter of its own, found by ``python=``, and is known by
its command line, its HTTP front end and the control sockets of its ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self

from attrs import evolve, frozen

from coldsnap.engines.acceptance import Answer, Question
from coldsnap.engines.argument_limits import Limits, options
from coldsnap.engines.base import LaunchCommand, MemoryProviderName
from coldsnap.engines.described import DescribedEngine, with_item, without_expandable_segments
from coldsnap.engines.endpoint import UNWATCHED, Watch
from coldsnap.engines.environment import EngineEnvironment, inspect_environment
from coldsnap.engines.settings import check_user_environment
from coldsnap.engines.sglang import arguments, contract
from coldsnap.engines.sglang.asking import ask
from coldsnap.engines.start_files import placed_model, start_files
from coldsnap.errors import UnsupportedError
from coldsnap.keeper.directive import Endpoint

__all__ = ["SGLang"]

ENTRY_POINT = "sglang.srt.plugins:coldsnap"

_MODULE = "sglang.launch_server"
_OTHERS = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "sglang-kernel", "torch_memory_saver")
_EAGER = ("--disable-cuda-graph",)


@frozen(kw_only=True)
class SGLang(DescribedEngine):
    """An SGLang server.

    Attributes:
        model: A repository of the hub together with ``revision``, or the directory of a model.
        revision: 40 hex digits of a commit; required for a model of the hub, not given for a directory.
        args: Further arguments of ``sglang.launch_server``; those that this library sets are refused.
        python: The interpreter of the environment that SGLang is installed in.
        env: Environment on top of the caller's.
        cwd: Working directory; ``/`` when not given, so that no directory is held busy.
        served_model_name: The name in the API; SGLang's own default is ``model``.
    """

    kind: ClassVar[str] = "sglang"
    names_workers: ClassVar[bool] = True
    start_load_format: ClassVar[Literal["coldsnap"] | None] = None
    distribution: ClassVar[str] = "sglang"
    argument_limits: ClassVar[Limits] = arguments.ARGUMENTS
    environment_limits: ClassVar[Limits] = arguments.ENVIRONMENT

    @property
    def world_size(self) -> int:
        """Return the number of ranks that hold a share of the model."""
        return self.tensor_parallel_size

    @property
    def tensor_parallel_size(self) -> int:
        """Return over how many ranks each layer is spread."""
        return self.size("--tp-size", "--tp", "--tensor-parallel-size")

    @property
    def pipeline_parallel_size(self) -> int:
        """Return 1: more stages are refused."""
        return 1

    @property
    def user_seeded(self) -> bool:
        """Return whether the user chose a seed."""
        return self._has("--random-seed")

    @property
    def imported(self) -> tuple[str, ...]:
        """Return nothing: no template of SGLang imports anything before it stops."""
        return ()

    @property
    def imported_environment(self) -> Mapping[str, str]:
        """Return nothing: a start method is an argument here, or there is no such template."""
        return {}

    def eager(self) -> Self:
        """Return the same engine without CUDA graphs."""
        return self if self._has(*_EAGER) else evolve(self, args=(*self.args, *_EAGER))

    def memory_provider(self, *, gpu: bool = False) -> MemoryProviderName | None:
        """Return whose allocations its weights are in: SGLang's memory saver's, where that is asked for.

        On a GPU it always is. On a processor SGLang's own has nothing to offer: ``args`` asks for it where a stand-in
        is installed.

        Args:
            gpu: Whether it is placed on a GPU.
        """
        if gpu:
            return "cuda"
        return "host" if self._has(arguments.MEMORY_SAVER) else None

    def refusals(self, *, gpu: bool = False) -> tuple[UnsupportedError, ...]:
        """Return what cannot be done with this specification, without looking at the machine.

        Args:
            gpu: Whether the engine is to be placed on a GPU.
        """
        return tuple(self.described_refusals(gpu=gpu))

    def inspect(self, environ: Mapping[str, str], *, timeout_s: float = 30.0) -> EngineEnvironment:
        """Ask the engine's interpreter what it has installed.

        Args:
            environ: The environment to start from, as for :meth:`launch_command`.
            timeout_s: For the process, s.

        Raises:
            AdmissionError: The interpreter is missing, or lacks SGLang or this very coldsnap.
        """
        return inspect_environment(
            self.python,
            engine=(self.distribution,),
            others=_OTHERS,
            entry_point=ENTRY_POINT,
            environ={**environ, **self.env},
            cwd=self.cwd or "/",
            timeout_s=timeout_s,
        )

    def admit(self, environment: EngineEnvironment) -> None:
        """Check that the installed SGLang has the structure that the plugin relies on.

        Raises:
            ContractError: With everything that is missing.
        """
        version = environment.versions.get(self.distribution, "")
        contract.report(environment.packages[self.distribution], version=version).require()

    @property
    def exports(self) -> bool:
        """Return True: every model of SGLang has a checkpoint."""
        return True

    def start_files(self, environ: Mapping[str, str]) -> Mapping[str, bytes]:
        """Read what SGLang needs to start besides tensors.

        Raises:
            AdmissionError: A file is missing or cannot be read.
        """
        return start_files(self.model_directory(environ))

    def checkpoint(self, environ: Mapping[str, str]) -> str:
        """Return the directory of the model."""
        return os.path.abspath(self.model_directory(environ))

    def with_start_files(self, argv: Sequence[str], directory: str) -> tuple[str, ...]:
        """Return the command with another ``--model-path``, under the name that it had in the API."""
        return placed_model(argv, "--model-path", directory, served=self.served_model)

    def launch_command(self, endpoint: Endpoint, *, environ: Mapping[str, str], gpu: bool = False) -> LaunchCommand:
        """Return what the keeper starts.

        Args:
            endpoint: Where SGLang is to listen.
            environ: The environment to start from: what is inherited, and the policy's settings.
            gpu: Whether it is placed on a GPU.

        Raises:
            AdmissionError: ``env`` sets a name that is this library's own.
        """
        check_user_environment(self.env, "sglang")
        env = self._environment(environ, gpu)
        argv = [self.python, "-m", _MODULE, "--model-path", self.model_argument]
        argv += ["--revision", self.revision] if self.revision is not None else []
        argv += ["--served-model-name", self.served_model_name] if self.served_model_name is not None else []
        argv += ["--host", endpoint.host, "--port", str(endpoint.port)]
        return LaunchCommand(argv=(*argv, *self._defaults(env, gpu), *self.args), env=env, cwd=self.cwd or "/")

    def _defaults(self, env: Mapping[str, str], gpu: bool) -> list[str]:
        result = [] if gpu or self._has("--device") else ["--device", "cpu"]
        releasing = env.get("COLDSNAP_EXPORT_MODEL_PAYLOAD") == "1"
        result += [arguments.MEMORY_SAVER] if releasing and not self._has(arguments.MEMORY_SAVER) else []
        # It shares memory between GPUs by handles that a restored process does not have.
        alone = self.world_size == 1 or self._has("--disable-custom-all-reduce")
        return result + (["--disable-custom-all-reduce"] if gpu and not alone else [])

    def _environment(self, environ: Mapping[str, str], gpu: bool) -> Mapping[str, str]:
        result = {**arguments.ENVIRONMENT_DEFAULTS}
        result |= arguments.ENVIRONMENT_DEFAULTS_GPU if gpu else arguments.ENVIRONMENT_CPU
        result |= {**self.inherited(environ), **self.env, **arguments.ENVIRONMENT_OWNED}
        result["SGLANG_PLUGINS"] = with_item(result.get("SGLANG_PLUGINS", ""), "coldsnap")
        if gpu:
            result["PYTORCH_CUDA_ALLOC_CONF"] = without_expandable_segments(result.get("PYTORCH_CUDA_ALLOC_CONF", ""))
        return result

    def installed_arguments(
        self,
        argv: Sequence[str],  # noqa: ARG002
        environment: EngineEnvironment,  # noqa: ARG002
        *,
        environ: Mapping[str, str],  # noqa: ARG002
    ) -> tuple[str, ...]:
        """Return nothing: SGLang chooses its loader itself."""
        return ()

    def roles(self, *, gpu: bool = False, environment: EngineEnvironment | None = None) -> Mapping[str, int]:  # noqa: ARG002
        """Return how many ranks of each role listen once SGLang is ready.

        Args:
            gpu: Makes no difference: schedulers are always processes of their own.
            environment: What is installed; some releases load no plugins in the detokenizer.
        """
        if environment is None:
            return {"api": 1, "worker": self.world_size, "detokenizer": 1}
        return contract.roles(environment.packages[self.distribution], workers=self.world_size)

    def ready_path(self, environment: EngineEnvironment, *, closed: bool) -> str | None:
        """Return ``/ready`` where this release has it, else ``None``; ``None`` for an engine that is closed, too.

        Never ``/health``: it generates a token, and so waits for what a paused scheduler does not do.
        """
        if closed:
            return None  # /ready says 503 until the door opens, and the front end answers before its schedulers can
        server = Path(environment.packages[self.distribution]) / "srt" / "entrypoints" / "http_server.py"
        return "/ready" if '"/ready"' in server.read_text(encoding="utf-8", errors="replace") else None

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
        return ask(endpoint, question, timeout_s=timeout_s, request_id=request_id, watch=watch)

    def _has(self, *names: str) -> bool:
        return any(name in names for name, _ in options(self.args))
