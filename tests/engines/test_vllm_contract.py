"""The contract with vLLM: by structure, on source files, for any tree."""

import textwrap

import pytest

from coldsnap.engines.vllm import contract
from coldsnap.errors import ContractError

FLAGS = ("stream", "ignore_eos", "return_token_ids")


@pytest.fixture
def tree(tmp_path):
    """A vLLM of outlines that meets the contract."""
    for requirement in contract.CONTRACT:
        path = tmp_path.joinpath(*requirement.module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    write(tmp_path, "plugins", "def load_general_plugins(): ...")
    for module, head in (
        ("engine.arg_utils", "class EngineArgs:\n    def __post_init__(self): load_general_plugins()"),
        ("v1.engine.core", "class EngineCore:\n    def __init__(self): load_general_plugins()"),
        ("v1.worker.worker_base", "class WorkerWrapperBase:\n    def init_worker(self): load_general_plugins()"),
        ("v1.engine.output_processor", "class OutputProcessor:\n    def get_num_unfinished_requests(self): ..."),
        (
            "entrypoints.openai.completion.protocol",
            "class CompletionRequest:\n"
            + "".join(f"    {field}: int\n" for field in ("prompt", "max_tokens", "temperature", "seed", *FLAGS)),
        ),
        ("v1.engine.async_llm", ASYNC_LLM),
    ):
        write(tmp_path, module, head)
    return tmp_path


ASYNC_LLM = """
class AsyncLLM:
    def __init__(self, vllm_config, executor_class): ...
    async def add_request(self, request_id, prompt, params): ...
    async def generate(self): await self.add_request()
    async def encode(self): await self.add_request()
    async def pause_generation(self, *, mode, clear_cache): ...
    async def resume_generation(self): ...
    async def is_paused(self): ...
    async def reset_prefix_cache(self): ...
    @property
    def errored(self): ...
"""


def write(tree, module, text):
    tree.joinpath(*module.split(".")).with_suffix(".py").write_text(textwrap.dedent(text))


def test_a_tree_that_has_everything_meets_the_contract_whatever_its_version(tree):
    report = contract.report(tree, version="99.0")
    assert report.missing == ()
    report.require()


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("async def resume_generation", "async def go_on", "resume_generation does not exist"),
        ("async def is_paused", "def is_paused", "is_paused is not a coroutine"),
        ("*, mode, clear_cache", "*, how", "pause_generation does not take clear_cache, mode"),
        (
            "async def generate(self): await self.add_request()",
            "async def generate(self): ...",
            "does not call add_req",
        ),
        ("class AsyncLLM", "class Engine", "AsyncLLM.__init__ does not exist"),
    ],
)
def test_what_changed_is_named_with_what_it_is_for(tree, before, after, told):
    write(tree, "v1.engine.async_llm", ASYNC_LLM.replace(before, after))
    report = contract.report(tree, version="99.0")
    assert any(told in line for line in report.missing)
    with pytest.raises(ContractError, match="vLLM 99.0") as caught:
        report.require()
    assert caught.value.missing == report.missing


def test_a_tree_without_a_module_is_told_so(tree):
    (tree / "v1" / "engine" / "core.py").unlink()
    (line,) = contract.report(tree).missing
    assert line.startswith("vllm.v1.engine.core:EngineCore.__init__ does not exist")


def test_a_module_may_be_a_package(tree):
    (tree / "plugins.py").unlink()
    (tree / "plugins").mkdir()
    (tree / "plugins" / "__init__.py").write_text("def load_general_plugins(): ...")
    assert contract.report(tree).missing == ()
