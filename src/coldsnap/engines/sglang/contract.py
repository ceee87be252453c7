"""What the plugin relies on in SGLang, checked by structure (``engines/structure.py``).

The one rule: whatever the plugin hooks, calls or is called by stands in this table; a hook without a row is a mistake.
"""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Mapping

from coldsnap.engines import structure
from coldsnap.engines.structure import Finding, Report, Requirement, Trees

__all__ = ["CONTRACT", "ITERATORS", "Finding", "Report", "Requirement", "report", "roles", "source_digest"]

_LOADS = ("load_plugins",)
_REGISTRY = "srt.plugins.hook_registry"
_UPDATER = "srt.managers.scheduler_components.weight_updater"
_RUNNER = "srt.model_executor.model_runner"
_LOADER = "srt.model_loader.loader"
_READERS = "srt.model_loader.weight_utils"
_TOKENIZER = "srt.managers.tokenizer_manager"
_CONTROL = "srt.managers.tokenizer_control_mixin"
_MESSAGES = "srt.managers.io_struct"
_GROUPS = "srt.distributed.parallel_state"
_NCCL = "srt.distributed.device_communicators.pynccl"
_POOL = "srt.model_executor.runner_utils.pool"

ITERATORS = (
    "safetensors_weights_iterator",
    "buffered_multi_thread_safetensors_weights_iterator",
    "fastsafetensors_weights_iterator",
)

CONTRACT: tuple[Requirement, ...] = (
    # The plugin: plugin.py, hooking.py
    Requirement(module="launch_server", why="is what is launched"),
    Requirement(module="srt.plugins", name="load_plugins", calls=("apply_hooks",), why="calls the plugin"),
    *(
        Requirement(module=module, name=name, calls=_LOADS, why=f"loads it in the {where}")
        for module, name, where in (
            ("srt.entrypoints.engine", "Engine._launch_subprocesses", "front end"),
            ("srt.managers.scheduler", "run_scheduler_process", "scheduler"),
        )
    ),
    Requirement(
        module=_REGISTRY,
        name="HookRegistry.register",
        parameters=("target", "hook", "hook_type"),
        why="takes the hooks",
    ),
    Requirement(module=_REGISTRY, name="HookRegistry.apply_hooks", why="puts them on"),
    Requirement(module=_REGISTRY, name="HookRegistry._patched", why="tells which of them are on"),
    *(
        Requirement(module=_REGISTRY, name=f"HookType.{one}", why="says when a hook runs")
        for one in ("AFTER", "AROUND")
    ),
    # The boundary: boundary.py
    *(
        Requirement(module="srt.constants", name=name, why="is the tag of a kind of memory")
        for name in ("GPU_MEMORY_TYPE_WEIGHTS", "GPU_MEMORY_TYPE_KV_CACHE", "GPU_MEMORY_TYPE_CUDA_GRAPH")
    ),
    Requirement(
        module=_UPDATER,
        name="SchedulerWeightUpdaterManager.release_memory_occupation",
        parameters=("recv_req",),
        calls=("add", "pause", "flush_cache", "barrier"),
        why="is where memory is taken away, in every rank at once",
    ),
    Requirement(
        module=_UPDATER,
        name="SchedulerWeightUpdaterManager.resume_memory_occupation",
        parameters=("recv_req",),
        calls=("remove", "resume", "barrier"),
        why="is where it is brought back",
    ),
    Requirement(
        module=_UPDATER,
        name="SchedulerWeightUpdaterManager.update_weights_from_disk",
        parameters=("recv_req",),
        why="is how a recovery loads",
    ),
    *(
        Requirement(module=_UPDATER, name=f"SchedulerWeightUpdaterManager.{field}", why="is the state of a rank there")
        for field in (
            "tp_worker",
            "draft_worker",
            "tp_cpu_group",
            "memory_saver_adapter",
            "is_fully_idle",
            "scheduler",
            "offload_tags",
        )
    ),
    *(
        Requirement(module=_MESSAGES, name=name, why="is what the boundary is asked and answers with")
        for name in (
            "ReleaseMemoryOccupationReqInput.tags",
            "ReleaseMemoryOccupationReqOutput",
            "ResumeMemoryOccupationReqInput.tags",
            "ResumeMemoryOccupationReqOutput",
            "UpdateWeightFromDiskReqInput.model_path",
            "UpdateWeightFromDiskReqInput.load_format",
            "UpdateWeightFromDiskReqInput.recapture_cuda_graph",
            "UpdateWeightFromDiskReqInput.flush_cache",
        )
    ),
    Requirement(
        module="srt.utils.torch_memory_saver_adapter",
        name="TorchMemorySaverAdapter.create",
        parameters=("enable",),
        why="makes the memory saver, and must be given one",
    ),
    # The models: loading.py, residents.py
    Requirement(
        module=_RUNNER,
        name="ModelRunner.load_model",
        calls=("load_model_with_memory_saver",),
        stores=("model",),
        why="has a model, target or draft, whose memory is final",
    ),
    Requirement(
        module="srt.model_executor.model_runner_components.load_model_utils",
        name="load_model_with_memory_saver",
        parameters=("memory_saver_adapter", "is_draft_worker"),
        calls=("region", "load_model"),
        why="loads it into the memory saver",
    ),
    Requirement(
        module=_LOADER,
        name="DefaultModelLoader.load_model",
        calls=("_initialize_model", "load_weights_and_postprocess", "_get_all_weights"),
        why="is the load that is observed",
    ),
    Requirement(
        module=_LOADER,
        name="DefaultModelLoader.load_weights_and_postprocess",
        parameters=("model", "weights", "target_device"),
        why="is what the observer is put around",
    ),
    Requirement(
        module=_LOADER, name="DefaultModelLoader._get_weights_iterator", calls=ITERATORS, why="names the files"
    ),
    *(
        Requirement(module=_READERS, name=name, parameters=("hf_weights_files",), why="reads them")
        for name in ITERATORS
    ),
    Requirement(module=_LOADER, name="get_model_loader", parameters=("load_config",), why="takes a loader's class"),
    Requirement(
        module="srt.configs.load_config",
        name="LoadConfig._verify_load_format",
        why="turns the name of a load format into what loads",
    ),
    Requirement(
        module="srt.arg_groups.choices",
        name="add_load_format_choices",
        instead=Requirement(
            module="srt.server_args", name="add_load_format_choices", parameters=("choices",), why="does in 0.5.17"
        ),
        why="makes its name known; server_args has it, too",
    ),
    Requirement(
        module="srt.model_executor.model_runner_components.weight_updater",
        name="WeightUpdater.update_weights_from_disk",
        parameters=("model_path", "load_format"),
        calls=("get_model_loader", "load_weights_and_postprocess", "get_model"),
        why="loads one model again, from a path that may be another's",
    ),
    # The front end: frontend.py
    Requirement(
        module=_TOKENIZER,
        name="TokenizerManager.__init__",
        parameters=("server_args",),
        why="is where the front end begins",
    ),
    Requirement(
        module=_TOKENIZER,
        name="TokenizerManager.generate_request",
        coroutine=True,
        parameters=("obj", "request"),
        why="is the door that a quiesce closes",
    ),
    Requirement(
        module=_TOKENIZER,
        name="TokenizerManager.pause_generation",
        coroutine=True,
        parameters=("obj",),
        stores=("is_pause",),
        why="stops the schedulers once they are idle",
    ),
    Requirement(
        module=_TOKENIZER,
        name="TokenizerManager.continue_generation",
        coroutine=True,
        parameters=("obj",),
        stores=("is_pause",),
        why="starts them again",
    ),
    Requirement(
        module=_TOKENIZER,
        name="TokenizerManager.auto_create_handle_loop",
        stores=("event_loop",),
        why="tells the event loop that the front end lives on",
    ),
    *(
        Requirement(module=_CONTROL, name=f"TokenizerControlMixin.{name}", coroutine=True, why=why)
        for name, why in (
            ("flush_cache", "empties the prefix cache, and is answered after what was asked before"),
            ("release_memory_occupation", "brings every scheduler to the boundary in one pass"),
            ("resume_memory_occupation", "does so for the way back"),
        )
    ),
    Requirement(
        module="srt.entrypoints.http_server",
        name="_wait_and_warmup",
        parameters=("server_args", "launch_callback", "execute_warmup_func"),
        stores=("server_status",),
        why="warms a server up with a request, and says that it is up",
    ),
    Requirement(module=_TOKENIZER, name="ServerStatus.Starting", why="makes /health and /ready say 503"),
    Requirement(module=_TOKENIZER, name="ServerStatus.Up", why="makes them say 200"),
    Requirement(module=_MESSAGES, name="PauseGenerationReqInput.mode", why="says how the schedulers stop"),
    Requirement(module=_MESSAGES, name="ContinueGenerationReqInput", why="starts them"),
    # Graphs and NCCL, on a GPU: graphs.py, nccl.py
    Requirement(
        module="srt.model_executor.runner_backend.full_cuda_graph_backend",
        name="FullCudaGraphBackend.cleanup",
        calls=("clear",),
        why="destroys the graphs of a runner",
    ),
    Requirement(module=_POOL, name="set_global_graph_memory_pool", parameters=("val",), why="forgets their memory"),
    Requirement(
        module=_RUNNER,
        name="ModelRunner.init_decode_cuda_graph",
        stores=("decode_cuda_graph_runner",),
        why="captures decode graphs late",
    ),
    Requirement(
        module=_RUNNER,
        name="ModelRunner.init_prefill_cuda_graph",
        stores=("prefill_cuda_graph_runner",),
        why="captures prefill graphs late",
    ),
    Requirement(module=_GROUPS, name="_groups", why="has every group of ranks"),
    *(
        Requirement(module=_GROUPS, name=f"GroupCoordinator.{name}", why="is what a group's communicators are made of")
        for name in ("ranks", "device_group", "pynccl_comm")
    ),
    Requirement(
        module=_NCCL,
        name="PyNcclCommunicator.__init__",
        parameters=("group", "device"),
        stores=("group", "device", "available", "disabled", "nccl", "comm"),
        why="makes a communicator, and so tells how to make it again",
    ),
    Requirement(
        module="srt.distributed.device_communicators.pynccl_wrapper",
        name="NCCLLibrary.ncclCommDestroy",
        parameters=("comm",),
        why="ends one before a capture",
    ),
)


def report(tree: str | os.PathLike[str], *, version: str = "") -> Report:
    """Hold the contract against an SGLang tree.

    Args:
        tree: The directory of the package ``sglang``.
        version: Its version, for the report.
    """
    return structure.report(CONTRACT, tree, engine="SGLang", package="sglang", version=version)


def roles(tree: str | os.PathLike[str], *, workers: int) -> Mapping[str, int]:
    """Say how many ranks of each role a server of this SGLang has.

    Args:
        tree: The directory of the package ``sglang``.
        workers: Its schedulers: one for each tensor-parallel rank.
    """
    # 0.5.17 loads no plugins there.
    detokenizer = Requirement(
        module="srt.managers.detokenizer_manager", name="run_detokenizer_process", calls=_LOADS, why="loads the plugin"
    )
    found = {"api": 1, "worker": workers}
    return found if Trees(os.fspath(tree)).lacks(detokenizer) else {**found, "detokenizer": 1}


def source_digest(tree: str | os.PathLike[str]) -> str:
    """Return the digest of the sources of every module that the contract names; absent modules count as such.

    Comments and layout do not count: it is over the syntax trees.

    Args:
        tree: The directory of the package ``sglang``.
    """
    digest = hashlib.sha256()
    for module in sorted({one.module for one in CONTRACT}):
        found = structure.parse(os.fspath(tree), module)
        text = "" if found is None else ast.dump(found)
        digest.update(f"{module}\0{hashlib.sha256(text.encode()).hexdigest()}\n".encode())
    return f"sha256:{digest.hexdigest()}"
