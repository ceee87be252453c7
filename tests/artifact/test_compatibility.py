"""What an artifact is refused for, in words, all at once."""

from __future__ import annotations

import attrs
import pytest
from made import GPU, ONE, Rules, descriptor, target

from coldsnap.artifact import Compatibility, Model, Requires, TargetCriu
from coldsnap.artifact.compatibility import compare, mismatches


def on_gpu(**changes):
    base = descriptor()
    unit = base.compatibility.units[0]
    unit = attrs.evolve(
        unit, devices=(GPU,), nvidia_driver_captured="610.43.02", nvidia_driver_min="610", cuda_userspace="13.0"
    )
    return attrs.evolve(base, compatibility=Compatibility(units=(attrs.evolve(unit, **changes),)))


GPU_HERE = {"unit_devices": (GPU,), "unit_nvidia_driver": "610.43.02", "engine_cuda_userspace": "13.0"}


def test_the_machine_of_the_capture_is_admitted_without_a_word() -> None:
    comparison = compare(descriptor(), target(), Rules())

    assert () == comparison.mismatches
    assert () == comparison.notes


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"unit_architecture": "aarch64"}, "unit rank0: architecture: captured x86_64, found aarch64"),
        ({"unit_cpu_flags": frozenset({"sse2"})}, "unit rank0: the processor lacks avx2 fma"),
        ({"unit_criu": None}, "unit rank0: there is no CRIU; 4.2.1 made the images"),
        (
            {"unit_criu": TargetCriu(version="4.2", sha256=ONE, check_passed=True)},
            "unit rank0: CRIU 4.2 is older than 4.2.1, which made the images",
        ),
        (
            {"unit_criu": TargetCriu(version="4.3", sha256=ONE, check_passed=False)},
            "unit rank0: criu check fails with CRIU 4.3",
        ),
        ({"engine_kind": "vllm"}, "engine: captured reference, found vllm"),
        ({"engine_version": "1.1"}, "reference version: captured 1.0, found 1.1"),
        ({"engine_torch": "2.12.0"}, "torch version: captured 2.13.0, found 2.12.0"),
        ({"engine_python": "3.12.1"}, "python version: captured 3.11.7, found 3.12.1"),
        (
            {"engine_coldsnap": "0.2.0"},
            "coldsnap version in the engine's environment: captured 0.1.0, found 0.2.0",
        ),
        (
            {"engine_site_packages_sha256": "sha256:" + "2" * 64},
            "the distributions installed in the engine's environment are not those of the capture",
        ),
        ({"engine_plugin_abis": (3, 2)}, "plugin_abi: captured 1, this library speaks 3 or 2; capture anew"),
        ({"engine_directive_formats": (2,)}, "directive_format: captured 1, this library writes 2; capture anew"),
        (
            {"engine_model": Model(id="tiny", revision="b" * 40)},
            f"model revision: captured {'a' * 40}, found {'b' * 40}",
        ),
    ],
)
def test_each_difference_is_refused_in_words(change, sentence: str) -> None:
    assert [sentence] == mismatches(descriptor(), target(**change), Rules())


def test_all_differences_come_at_once() -> None:
    found = mismatches(
        descriptor(),
        target(unit_architecture="aarch64", unit_criu=None, engine_version="2", engine_plugin_abis=(9,)),
        Rules(),
    )

    assert 4 == len(found)


def test_the_plugin_abi_before_is_still_spoken() -> None:
    assert [] == mismatches(descriptor(), target(engine_plugin_abis=(2, 1)), Rules())


def test_another_kernel_is_noted_under_capability_and_refused_under_exact() -> None:
    here = target(unit_kernel="6.8.0")

    assert () == compare(descriptor(), here, Rules()).mismatches
    assert "criu check decides" in compare(descriptor(), here, Rules()).notes[0]
    assert ["unit rank0: kernel release: captured 6.1.0, found 6.8.0"] == mismatches(
        descriptor(), here, Rules(kernel="exact")
    )


def test_a_newer_criu_is_noted_under_capability_and_refused_under_exact() -> None:
    here = target(unit_criu=TargetCriu(version="4.3", sha256=ONE, check_passed=True))

    assert () == compare(descriptor(), here, Rules()).mismatches
    assert "another build" in compare(descriptor(), here, Rules()).notes[0]
    assert 1 == len(mismatches(descriptor(), here, Rules(kernel="exact")))


def test_the_same_gpu_is_admitted_whatever_its_ordinal_or_driver_release() -> None:
    assert [] == mismatches(on_gpu(), target(**GPU_HERE), Rules())
    assert [] == mismatches(on_gpu(), target(**{**GPU_HERE, "unit_nvidia_driver": "615.1"}), Rules())


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({"unit_devices": ()}, 1),
        ({"unit_devices": (attrs.evolve(GPU, gpu_name="NVIDIA H100"),)}, 1),
        ({"unit_devices": (attrs.evolve(GPU, compute_capability="10.0"),)}, 1),
        ({"unit_devices": (attrs.evolve(GPU, capacity_class_bytes=1 << 30),)}, 1),
        ({"unit_nvidia_driver": None}, 1),
        ({"unit_nvidia_driver": "580.1"}, 2),
        ({"engine_cuda_userspace": "12.8"}, 1),
    ],
)
def test_each_gpu_difference_is_refused(change, count: int) -> None:
    assert count == len(mismatches(on_gpu(), target(**{**GPU_HERE, **change}), Rules()))


def test_a_target_local_template_belongs_to_one_driver_release() -> None:
    captured = on_gpu()
    local = attrs.evolve(captured, compatibility=attrs.evolve(captured.compatibility, policy="target-local-v1"))
    newer = target(**{**GPU_HERE, "unit_nvidia_driver": "700.1"})

    assert [] == mismatches(captured, newer, Rules())
    (only,) = mismatches(local, newer, Rules())
    assert "NVIDIA driver of a target-local template: captured" in only


def test_the_captured_driver_floor_and_the_release_rule_can_be_lifted() -> None:
    here = target(**{**GPU_HERE, "unit_nvidia_driver": "580.1"})

    assert 1 == len(mismatches(on_gpu(), here, Rules(enforce_captured_driver_floor=False)))
    assert [] == mismatches(on_gpu(), here, Rules(enforce_captured_driver_floor=False, driver="probed"))


def test_an_artifact_without_a_gpu_does_not_ask_for_one() -> None:
    assert [] == mismatches(descriptor(), target(unit_devices=(GPU,), unit_nvidia_driver="610.1"), Rules())


def test_units_workers_and_host_features_must_match() -> None:
    needs = descriptor(requires=Requires(features=("criu-process-tree",)))
    elsewhere = attrs.evolve(target(unit_unit="rank1"), tensor_parallel_size=2)

    found = mismatches(descriptor(), elsewhere, Rules())

    assert ["the host feature criu-process-tree has not passed its probe"] == [
        text.partition(": ")[2] for text in mismatches(needs, target(), Rules(driver="probed"))
    ]
    assert [] == mismatches(needs, target(), Rules(driver="release"))
    assert ["unit rank0 has no machine", "unit rank1 is not in the artifact"] == found[:2]
    assert "captured with 1 tensor-parallel workers, asked for 2" == found[2]
