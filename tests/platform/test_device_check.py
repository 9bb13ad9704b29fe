"""Checks of a GPU before a run; on a CPU there is none to check."""

from pathlib import Path

import pytest

from grpo_mp import platform
from grpo_mp.platform.machine_check import check_allocator, check_no_unusable_gpu
from grpo_mp.utils.errors import UserError


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


def test_expandable_segments_are_refused() -> None:
    with pytest.raises(UserError, match=r"^PYTORCH_ALLOC_CONF: expandable segments cannot be shared with an engine"):
        check_allocator({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"})
    check_allocator({"PYTORCH_ALLOC_CONF": "expandable_segments:False"})
