"""A GPU that somebody else uses. The rule is pure; a CPU has no device to be taken."""

from pathlib import Path

import pytest

from grpo_mp import platform
from grpo_mp.errors import UserError
from grpo_mp.platform.device_check import check_device, check_free, check_left_alone, check_needed

GIB = 2**30


def test_a_device_in_use_is_refused_with_how_much() -> None:
    with pytest.raises(
        UserError, match=r"^GPU 3: 70\.0 of 140\.0 GiB are in use by another process: end it, or choose"
    ):
        check_free(3, 70 * GIB, 140 * GIB)


def test_what_a_context_or_a_screen_takes_is_no_obstacle() -> None:
    check_free(0, 139 * GIB, 140 * GIB)
    check_free(0, 7 * GIB, 8 * GIB)


@pytest.mark.skipif(platform.on_cuda(), reason="there is a GPU")
def test_on_a_cpu_nothing_is_taken() -> None:
    check_device(7)


@pytest.mark.skipif(platform.on_cuda(), reason="there is a GPU")
def test_gpus_that_torch_cannot_use_are_not_passed_over_in_silence(tmp_path: Path) -> None:
    driver = tmp_path / "version"
    check_left_alone({}, driver)
    driver.write_text("NVRM version")
    with pytest.raises(
        UserError, match=r"has NVIDIA GPUs, but torch .* cannot use them \((it is built for CPUs|CUDA .* do not fit)\)"
    ):
        check_left_alone({}, driver)
    with pytest.raises(UserError, match="set CUDA_VISIBLE_DEVICES= to run on the CPU"):
        check_left_alone({"CUDA_VISIBLE_DEVICES": "0,1"}, driver)
    check_left_alone({"CUDA_VISIBLE_DEVICES": ""}, driver)


def test_what_a_gpu_run_needs_and_lacks_is_named() -> None:
    def load(module: str) -> None:
        if module == "torch_memory_saver":
            raise ImportError("libcuda.so.1:\n no such file")

    with pytest.raises(UserError, match=r"^torch_memory_saver does not load \(libcuda\.so\.1: no such file\): install"):
        check_needed({}, load)
    with pytest.raises(UserError, match=r"^PYTORCH_ALLOC_CONF: expandable segments cannot be shared with an engine"):
        check_needed({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}, load)
    check_needed({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, lambda _: None)
