"""What the plugin relies on in vLLM, checked by structure.

The check reads source files and imports nothing, so that it answers for any vLLM tree, also one that cannot run here.
There is no version gate: a version that has everything is good, whatever its number.

The one rule: whatever the plugin wraps, calls or is called by stands in this table; a hook without a row is a mistake.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator

from attrs import frozen

from coldsnap.errors import ContractError

__all__ = ["CONTRACT", "Finding", "Report", "Requirement", "report"]


@frozen(kw_only=True)
class Requirement:
    """One object that must be there.

    Attributes:
        module: Its module, below the package, with dots.
        name: ``Class``, ``Class.method``, ``Class.field`` or ``function``; empty for the module itself.
        coroutine: Whether it must be an ``async def``.
        parameters: Names it must accept.
        calls: Names it must call: ``self.x`` as ``x``.
        stores: Attributes of ``self`` that it must set.
        why: What the plugin uses it for.
    """

    module: str
    name: str = ""
    coroutine: bool = False
    parameters: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()
    why: str

    def __str__(self) -> str:
        return f"{self.module}{':' if self.name else ''}{self.name}"


_LLM = "v1.engine.async_llm"
_LOADS = ("load_general_plugins",)
_CUMEM = "device_allocator.cumem"
_SLEEP = "device_allocator.sleep_mode_backend"
_WORKER = "v1.worker.gpu_worker"
_LOADER = "model_executor.model_loader.default_loader"

CONTRACT: tuple[Requirement, ...] = (
    Requirement(module="entrypoints.openai.api_server", why="is what is launched"),
    Requirement(module="plugins", name="load_general_plugins", why="loads the plugin"),
    Requirement(
        module="engine.arg_utils", name="EngineArgs.__post_init__", calls=_LOADS, why="loads it in the front end"
    ),
    Requirement(module="v1.engine.core", name="EngineCore.__init__", calls=_LOADS, why="loads it in the engine core"),
    Requirement(
        module="v1.worker.worker_base",
        name="WorkerWrapperBase.init_worker",
        calls=_LOADS,
        why="loads it in each worker",
    ),
    Requirement(
        module=_LLM,
        name="AsyncLLM.__init__",
        parameters=("vllm_config", "executor_class"),
        why="is where the front end begins",
    ),
    Requirement(
        module=_LLM,
        name="AsyncLLM.add_request",
        coroutine=True,
        parameters=("request_id", "prompt", "params"),
        why="is the door that a quiesce closes",
    ),
    Requirement(module=_LLM, name="AsyncLLM.generate", calls=("add_request",), why="must pass that door"),
    Requirement(module=_LLM, name="AsyncLLM.encode", calls=("add_request",), why="must pass that door"),
    Requirement(
        module=_LLM,
        name="AsyncLLM.pause_generation",
        coroutine=True,
        parameters=("mode", "clear_cache"),
        why="stops the scheduler once it is idle",
    ),
    Requirement(module=_LLM, name="AsyncLLM.resume_generation", coroutine=True, why="starts it again"),
    Requirement(module=_LLM, name="AsyncLLM.is_paused", coroutine=True, why="confirms that it stands"),
    Requirement(module=_LLM, name="AsyncLLM.reset_prefix_cache", coroutine=True, why="empties the prefix cache"),
    Requirement(module=_LLM, name="AsyncLLM.errored", why="tells whether the engine core is dead"),
    Requirement(
        module="v1.engine.output_processor",
        name="OutputProcessor.get_num_unfinished_requests",
        why="counts the requests in flight",
    ),
    *(
        Requirement(
            module="entrypoints.openai.completion.protocol",
            name=f"CompletionRequest.{field}",
            why="the acceptance request",
        )
        for field in ("prompt", "max_tokens", "temperature", "seed", "stream", "ignore_eos", "return_token_ids")
    ),
    # The allocator: allocator.py
    Requirement(
        module=_CUMEM, name="CuMemAllocator.get_instance", why="is the one allocator of a process, and its table"
    ),
    Requirement(
        module=_CUMEM, name="CuMemAllocator.__init__", stores=("pointer_to_data",), why="tells address → allocation"
    ),
    Requirement(module=_CUMEM, name="CuMemAllocator.get_current_usage", why="counts what sleeps, too"),
    *(
        Requirement(module=_CUMEM, name=name, parameters=("allocation_handle",), calls=(f"python_{name}",), why=why)
        for name, why in (
            ("create_and_map", "brings backing to an address"),
            ("unmap_and_release", "takes it away and keeps the address"),
        )
    ),
    Requirement(module=_CUMEM, name="libcudart", why="copies, and clears what was mapped anew"),
    *(
        Requirement(module="device_allocator", name=f"AllocationData.{field}", why="is an entry of that table")
        for field in ("handle", "tag", "cpu_backup_tensor", "is_asleep")
    ),
    Requirement(
        module="distributed.device_communicators.cuda_wrapper",
        name="CudaRTLibrary.cudaMemcpy",
        parameters=("dst", "src", "count"),
        why="copies between host and device",
    ),
    Requirement(
        module="distributed.device_communicators.cuda_wrapper",
        name="CudaRTLibrary.cudaMemset",
        parameters=("devPtr", "value", "count"),
        why="clears device memory",
    ),
    # The worker: memory.py, kv_guard.py
    Requirement(
        module=_WORKER,
        name="Worker.load_model",
        calls=("_maybe_get_memory_pool_context", "load_model"),
        why="puts the weights into the allocator",
    ),
    Requirement(
        module=_WORKER,
        name="Worker.initialize_from_config",
        calls=("_maybe_get_memory_pool_context", "initialize_kv_cache"),
        why="puts the KV cache into the allocator",
    ),
    Requirement(
        module=_WORKER,
        name="Worker.init_device",
        stores=("device", "init_snapshot", "requested_memory"),
        why="says which device, and how much of it vLLM may use",
    ),
    Requirement(
        module=_WORKER,
        name="Worker.determine_available_memory",
        stores=("peak_activation_memory",),
        why="chooses the size of the KV cache, which the guard caps",
    ),
    Requirement(module=_WORKER, name="Worker.get_model", why="is what the load wrote to"),
    Requirement(
        module="v1.worker.worker_base",
        name="WorkerBase.__init__",
        stores=("model_config", "cache_config", "rank"),
        why="says what the worker was made for",
    ),
    Requirement(
        module="config.model", name="ModelConfig.enable_cumem_allocator", why="says whether the allocator is used"
    ),
    Requirement(module="config.cache", name="CacheConfig.kv_cache_memory_bytes", why="is a size that the user chose"),
    Requirement(
        module="v1.worker.gpu_model_runner",
        name="GPUModelRunner.__init__",
        stores=("kv_caches",),
        why="holds the KV cache tensors",
    ),
    Requirement(
        module="v1.worker.gpu.model_runner",
        name="GPUModelRunner.initialize_kv_cache",
        stores=("kv_caches",),
        why="holds the KV cache tensors, in the second runner",
    ),
    Requirement(
        module="v1.executor.uniproc_executor",
        name="UniProcExecutor._init_executor",
        calls=("init_worker", "load_model"),
        why="has a single worker in the engine core's process",
    ),
    # The sleep backend: sleep.py
    Requirement(
        module=_SLEEP,
        name="SleepModeBackendFactory.register_backend",
        parameters=("name", "module_path", "class_name"),
        why="makes the backend known by name",
    ),
    Requirement(module=_SLEEP, name="SleepModeBackendFactory._registry", why="has the entry that an override replaces"),
    Requirement(module=_SLEEP, name="SleepModeBackend.state", why="says whether it sleeps"),
    Requirement(module=_SLEEP, name="CuMemBackend.suspend", parameters=("level",), why="is what a level 2 still does"),
    Requirement(module=_SLEEP, name="CuMemBackend.resume", parameters=("tags",), why="wakes what it put to sleep"),
    *(
        Requirement(
            module=_WORKER,
            name=f"Worker.{name}",
            parameters=(argument,),
            calls=(calls,),
            why="is what vLLM's own API reaches the backend through",
        )
        for name, argument, calls in (("sleep", "level", "suspend"), ("wake_up", "tags", "resume"))
    ),
    # The load formats of a launch on a GPU, and the load observer: engine.py, loading.py
    *(
        Requirement(
            module="model_executor.model_loader.weight_utils",
            name=f"{name}_weights_iterator",
            parameters=("hf_weights_files",),
            why=why,
        )
        for name, why in (
            ("instanttensor", "is what --load-format instanttensor reads with"),
            ("fastsafetensors", "is what --load-format fastsafetensors reads with"),
            ("safetensors", "is what any other load of safetensors reads with"),
            ("multi_thread_safetensors", "is the same with several threads"),
        )
    ),
    Requirement(
        module=_LOADER,
        name="DefaultModelLoader._get_weights_iterator",
        calls=(
            "safetensors_weights_iterator",
            "multi_thread_safetensors_weights_iterator",
            "fastsafetensors_weights_iterator",
            "instanttensor_weights_iterator",
        ),
        why="gives these iterators the files",
    ),
    Requirement(
        module=_LOADER,
        name="DefaultModelLoader.get_all_weights",
        calls=("_get_weights_iterator",),
        why="is where a model's weights come from",
    ),
    Requirement(
        module=_LOADER,
        name="DefaultModelLoader.load_weights",
        parameters=("model", "model_config"),
        calls=("get_all_weights", "load_weights"),
        why="is the load that is observed",
    ),
)


@frozen(kw_only=True)
class Finding:
    """What was found for one requirement.

    Attributes:
        requirement: The requirement.
        lacks: What is wrong with it, as a sentence without its subject; empty when it is met.
    """

    requirement: Requirement
    lacks: str = ""

    def __str__(self) -> str:
        return f"vllm.{self.requirement} {self.lacks or 'is as expected'} ({self.requirement.why})"


@frozen(kw_only=True)
class Report:
    """The contract, held against one vLLM tree.

    Attributes:
        tree: The directory of the package.
        version: Its version, when known; only for reading.
        findings: One for each requirement.
    """

    tree: str
    version: str
    findings: tuple[Finding, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """Return what is not as expected, in words."""
        return tuple(str(finding) for finding in self.findings if finding.lacks)

    def require(self) -> None:
        """Demand that every requirement is met.

        Raises:
            ContractError: With everything that is not.
        """
        if self.missing:
            raise ContractError(f"vLLM {self.version} in {self.tree} lacks what the plugin relies on:", self.missing)


def report(tree: str | os.PathLike[str], *, version: str = "") -> Report:
    """Hold the contract against a vLLM tree.

    Args:
        tree: The directory of the package ``vllm``.
        version: Its version, for the report.
    """
    modules: dict[str, ast.Module | None] = {}
    findings = []
    for requirement in CONTRACT:
        if requirement.module not in modules:
            modules[requirement.module] = _parse(os.fspath(tree), requirement.module)
        findings.append(Finding(requirement=requirement, lacks=_lacks(modules[requirement.module], requirement)))
    return Report(tree=os.fspath(tree), version=version, findings=tuple(findings))


def _parse(tree: str, module: str) -> ast.Module | None:
    base = os.path.join(tree, *module.split("."))
    for path in (f"{base}.py", os.path.join(base, "__init__.py")):
        if os.path.isfile(path):
            with open(path, "rb") as file:
                return ast.parse(file.read(), filename=path)
    return None


def _lacks(module: ast.Module | None, requirement: Requirement) -> str:
    if module is None:
        return "does not exist"
    node: ast.AST | None = module
    for name in requirement.name.split(".") if requirement.name else ():
        node = _member(node, name)
    if node is None:
        return "does not exist"
    if requirement.coroutine and not isinstance(node, ast.AsyncFunctionDef):
        return "is not a coroutine"
    if absent := sorted(set(requirement.parameters) - _parameters(node)):
        return f"does not take {', '.join(absent)}"
    if absent := sorted(set(requirement.calls) - set(_calls(node))):
        return f"does not call {', '.join(absent)}"
    if absent := sorted(set(requirement.stores) - set(_stores(node))):
        return f"does not set {', '.join(absent)}"
    return ""


def _member(node: ast.AST | None, name: str) -> ast.AST | None:
    for child in getattr(node, "body", ()):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and child.name == name:
            return child
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name) and child.target.id == name:
            return child
        if isinstance(child, ast.If | ast.Try) and (found := _member(child, name)) is not None:
            return found
    return None


def _parameters(node: ast.AST) -> set[str]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    return {argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def _calls(node: ast.AST) -> Iterator[str]:
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            if isinstance(call.func, ast.Name):
                yield call.func.id
            elif isinstance(call.func, ast.Attribute):
                yield call.func.attr


def _stores(node: ast.AST) -> Iterator[str]:
    for target in ast.walk(node):
        if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
            yield target.attr
