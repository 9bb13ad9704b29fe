"""Checks of a GPU before a run; on a CPU there is none to check."""

from pathlib import Path

import pytest

from grpo_mp import platform
from grpo_mp.platform.machine_check import check_free, check_no_unusable_gpu, check_requirements
from grpo_mp.utils.errors import UserError

GIB = 2**30


def test_device_in_use_is_an_error_with_the_used_memory() -> None:
    with pytest.raises(
        UserError, match=r"^GPU 3: 70\.0 of 140\.0 GiB are in use by another process: stop it, or choose"
    ):
        check_free(3, 70 * GIB, 140 * GIB)


@pytest.mark.skipif(platform.on_cuda(), reason="there is a GPU")
def test_gpu_that_torch_cannot_use_is_an_error(tmp_path: Path) -> None:
    driver = tmp_path / "version"
    check_no_unusable_gpu({}, driver)
    driver.write_text("NVRM version")
    with pytest.raises(
        UserError, match=r"has NVIDIA GPUs, but torch .* cannot use them \((it is built for CPUs|CUDA .* do not fit)\)"
    ):
        check_no_unusable_gpu({}, driver)
    with pytest.raises(UserError, match="set CUDA_VISIBLE_DEVICES= to run on the CPU"):
        check_no_unusable_gpu({"CUDA_VISIBLE_DEVICES": "0,1"}, driver)
    check_no_unusable_gpu({"CUDA_VISIBLE_DEVICES": ""}, driver)


def test_missing_requirement_of_a_gpu_run_is_named() -> None:
    def load(module: str) -> None:
        if module == "torch_memory_saver":
            raise ImportError("libcuda.so.1:\n no such file")

    with pytest.raises(UserError, match=r"^torch_memory_saver does not load \(libcuda\.so\.1: no such file\): install"):
        check_requirements({}, load)
    with pytest.raises(UserError, match=r"^PYTORCH_ALLOC_CONF: expandable segments cannot be shared with an engine"):
        check_requirements({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}, load)
    check_requirements({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, lambda _: None)
    with pytest.raises(UserError, match=r"^TORCH_DIST_USE_NCCL2=1: its process groups cannot release memory"):
        check_requirements({"TORCH_DIST_USE_NCCL2": "1"}, lambda _: None)
