"""What the plugin relies on in vLLM, checked by structure (``engines/structure.py``).

The one rule: whatever the plugin wraps, calls or is called by stands in this table; a hook without a row is a mistake.
"""

from __future__ import annotations

import os

from coldsnap.engines import structure
from coldsnap.engines.structure import Finding, Report, Requirement

__all__ = ["CONTRACT", "Finding", "Report", "Requirement", "report"]

_LLM = "v1.engine.async_llm"
_LOADS = ("load_general_plugins",)
_CUMEM = "device_allocator.cumem"
_SLEEP = "device_allocator.sleep_mode_backend"
_RENDERER = "renderers.base"
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
    # The multimodal warm-up of a start for a restore: mm_warmup.py
    Requirement(
        module=_RENDERER,
        name="BaseRenderer._warmup_mm_processor",
        parameters=("processor", "log_prefix"),
        why="is the warm-up that waits until the engine is open",
    ),
    Requirement(module=_RENDERER, name="BaseRenderer._process_multimodal", why="is a real request, which cancels it"),
    Requirement(
        module=_RENDERER,
        name="BaseRenderer.__init__",
        stores=("_mm_executor",),
        why="does one of them at a time",
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
    # The load format of a fresh start: load_format.py
    Requirement(
        module="model_executor.model_loader",
        name="register_model_loader",
        parameters=("load_format",),
        why="makes the load format coldsnap known by name",
    ),
    Requirement(
        module="model_executor.model_loader",
        name="get_model_loader",
        parameters=("load_config",),
        why="finds the loader that reads a checkpoint for it",
    ),
    Requirement(
        module="model_executor.model_loader.base_loader",
        name="BaseModelLoader.load_model",
        calls=("load_weights", "process_weights_after_loading"),
        why="makes the model before the load, and post-processes it after",
    ),
)


def report(tree: str | os.PathLike[str], *, version: str = "") -> Report:
    """Hold the contract against a vLLM tree.

    Args:
        tree: The directory of the package ``vllm``.
        version: Its version, for the report.
    """
    return structure.report(CONTRACT, tree, engine="vLLM", package="vllm", version=version)
