"""What stands in for packages that need a GPU: it can be imported, not used; the memory saver really loses memory."""

import subprocess
import textwrap

import pytest

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def run(sglang_python):
    def run(code):
        done = subprocess.run(
            [sglang_python, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_kernels_are_defined_and_raise_when_they_are_launched(run):
    run("""
        import sgl_kernel, triton, triton.language as tl
        from torchvision.transforms import InterpolationMode
        from triton.runtime.jit import JITFunction

        @triton.autotune(configs=[triton.Config({"BLOCK": 16}, num_warps=4)], key=["n"])
        @triton.jit
        def kernel(x, BLOCK: tl.constexpr): pass

        def refused(call):
            try:
                call()
            except NotImplementedError as error:
                return str(error)
            raise AssertionError("it ran")

        assert "kernel" in refused(lambda: kernel[(1,)](1))
        assert "sgl_kernel.silu_and_mul" in refused(lambda: sgl_kernel.silu_and_mul(1))
        assert triton.cdiv(7, 2) == 4 and triton.next_power_of_2(5) == 8
        assert isinstance(JITFunction, type) and triton.backends.backends == {}
    """)


def test_the_memory_saver_takes_pages_away_and_keeps_addresses(run):
    run("""
        import torch
        from torch_memory_saver import torch_memory_saver as saver

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096

        size = 64 << 20
        with saver.region(tag="weights"):
            weights = torch.nn.Linear(1024, size // 4096, bias=False, dtype=torch.float32)
            derived = weights.weight * 1
        with saver.region(tag="kv_cache"):
            cache = torch.zeros(1024)
            with saver.disable():
                outside = torch.ones(1024)
        assert {region.tag for region in saver.memory.regions()} == {"weights", "kv_cache"}
        assert sum(region.size_bytes for region in saver.memory.regions("weights")) >= size
        weights.weight.data.fill_(3)
        cache.fill_(5)
        address, before = weights.weight.data_ptr(), resident()
        saver.pause("weights")
        saver.pause("weights")
        assert before - resident() > size // 2
        saver.resume("weights")
        assert weights.weight.data_ptr() == address and not weights.weight.any()
        assert cache.sum() == 5 * 1024 and outside.sum() == 1024 and derived.any()
    """)
