"""Check that this rank's GPU exists, works and is free, and that the packages that it needs are installed."""

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

import torch

from grpo_mp import platform
from grpo_mp.platform.cuda_libraries import check_preload, check_toolkit, memory_saver_library
from grpo_mp.utils.errors import UserError, one_line

MAX_USED_SHARE = 0.2  # of the memory; a CUDA context or a display uses less
CHOOSE_OTHER = "choose other GPUs (CUDA_VISIBLE_DEVICES)"
DRIVER = Path("/proc/driver/nvidia/version")
REQUIRED = {  # modules of the trainer, and of an engine that shares its GPU, with the advice where one is missing
    "transformer_engine.pytorch": "build transformer-engine against this torch, as the README says",
    "torch_memory_saver": "install the engine as grpo-mp[gpu] does",
}
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def check_device(local_rank: int) -> None:
    """Raise UserError where the GPU of this rank is missing, cannot be used or is used by another process."""
    if not platform.on_cuda():
        check_no_unusable_gpu(os.environ, DRIVER)
        return
    check_requirements(os.environ, import_module)
    check_toolkit(os.environ)
    check_preload(memory_saver_library(), os.environ)
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"the {local_rank + 1} ranks of this node need a GPU each, torch sees {count}: start fewer ranks, or let "
            "every rank see all of the node's GPUs (CUDA_VISIBLE_DEVICES)"
        )
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info(local_rank)
    except RuntimeError as error:
        raise UserError(f"GPU {local_rank} cannot be used ({error}): reset it, or {CHOOSE_OTHER}") from error
    check_free(local_rank, free_bytes, total_bytes)


def check_no_unusable_gpu(environment: Mapping[str, str], driver: Path) -> None:
    """Raise UserError where the machine has GPUs that torch cannot use and CUDA_VISIBLE_DEVICES does not hide."""
    if not driver.exists() or environment.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1"):
        return
    reason = f"CUDA {torch.version.cuda} and the driver do not fit" if torch.version.cuda else "it is built for CPUs"
    raise UserError(
        f"this machine has NVIDIA GPUs, but torch {torch.__version__} cannot use them ({reason}): install another "
        "torch or driver, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
    )


def check_requirements(environment: Mapping[str, str], load: Callable[[str], object]) -> None:
    """Raise UserError where a module does not load, or the allocator's memory cannot be shared by CUDA IPC."""
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in environment.get(name, "").lower():
            raise UserError(f"{name}: expandable segments cannot be shared with an engine: remove them")
    if environment.get("TORCH_DIST_USE_NCCL2") == "1":
        raise UserError("TORCH_DIST_USE_NCCL2=1: its process groups cannot release memory between phases: unset it")
    for module, advice in REQUIRED.items():
        try:
            load(module)
        except (ImportError, OSError, RuntimeError) as error:
            raise UserError(f"{module} does not load ({one_line(error, 200)}): {advice}") from error


def check_free(device: int, free_bytes: int, total_bytes: int) -> None:
    """Raise UserError where other processes use more of a device than MAX_USED_SHARE. Pure."""
    used_bytes = total_bytes - free_bytes
    if used_bytes > MAX_USED_SHARE * total_bytes:
        raise UserError(
            f"GPU {device}: {used_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB are in use by another process: "
            f"stop it, or {CHOOSE_OTHER}"
        )
