"""Checks of a machine at the start of a job, in the node check of Slurm jobs, and in `grpo-mp doctor machine`."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from grpo_mp import platform
from grpo_mp.platform.cuda_libraries import check_engine_libraries
from grpo_mp.utils.errors import UserError

MAX_USED_SHARE = 0.2  # of GPU memory at the start; a CUDA context or a display uses less
DRIVER = Path("/proc/driver/nvidia/version")
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def check_start(local_rank: int) -> None:
    """Check this rank's GPU; on the first rank of a node also that engines can start there."""
    check_device(local_rank)
    if local_rank == 0 and platform.on_cuda():
        check_engine_libraries(os.environ)


def check_device(local_rank: int) -> None:
    """Check that this rank has a working GPU that no other process uses.

    Without CUDA, check that the machine has no GPUs that torch cannot use.
    """
    if not platform.on_cuda():
        check_no_unusable_gpu(os.environ, DRIVER)
        return
    check_allocator(os.environ)
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"the {local_rank + 1} ranks of this node need a GPU each, torch sees {count}: start fewer ranks, or let "
            "every rank see all of the node's GPUs (CUDA_VISIBLE_DEVICES)"
        )
    free_bytes, total_bytes = torch.cuda.mem_get_info(local_rank)
    used_bytes = total_bytes - free_bytes
    if used_bytes > MAX_USED_SHARE * total_bytes:
        raise UserError(
            f"GPU {local_rank}: {used_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB are in use by another "
            "process: stop it, or choose other GPUs (CUDA_VISIBLE_DEVICES)"
        )


def check_no_unusable_gpu(environment: Mapping[str, str], driver: Path) -> None:
    """Refuse a machine with GPUs that torch cannot use, unless CUDA_VISIBLE_DEVICES hides them.

    `driver`: file that exists if an NVIDIA driver is loaded.
    """
    if not driver.exists() or environment.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1"):
        return
    reason = f"CUDA {torch.version.cuda} and the driver do not fit" if torch.version.cuda else "it is built for CPUs"
    raise UserError(
        f"this machine has NVIDIA GPUs, but torch {torch.__version__} cannot use them ({reason}): install another "
        "torch or driver, start the container with the driver (--gpus all, --nv), or set CUDA_VISIBLE_DEVICES= to run "
        "on the CPU"
    )


def check_allocator(environment: Mapping[str, str]) -> None:
    """Refuse allocator settings with which GPU memory cannot be shared with an engine."""
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in environment.get(name, "").lower():
            raise UserError(f"{name}: expandable segments cannot be shared with an engine: remove them")
