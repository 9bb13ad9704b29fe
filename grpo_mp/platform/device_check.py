"""Is this rank's GPU there, usable and free, and is installed what a run on it needs?"""

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

import torch

from grpo_mp import platform
from grpo_mp.errors import UserError

TAKEN_SHARE = 0.2  # of the memory; a CUDA context, or a screen, takes less
CHOOSE = "choose other GPUs (CUDA_VISIBLE_DEVICES)"
DRIVER = Path("/proc/driver/nvidia/version")
NEEDED = {  # modules of the trainer and of an engine that shares its GPU
    "transformer_engine.pytorch": "build transformer-engine against this torch, as the README says",
    "torch_memory_saver": "install the engine as grpo-mp[gpu] does",
}
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def check_device(local_rank: int) -> None:
    """Raise UserError where the GPU of this rank is missing, cannot be used or is in use by somebody else."""
    if not platform.on_cuda():
        check_left_alone(os.environ, DRIVER)
        return
    check_needed(os.environ, import_module)
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"the {local_rank + 1} ranks of this node need a GPU each, it shows {count}: start fewer ranks, or let "
            "every rank see all of the node's GPUs (CUDA_VISIBLE_DEVICES)"
        )
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info(local_rank)
    except RuntimeError as error:
        raise UserError(f"GPU {local_rank} cannot be used ({error}): mend it, or {CHOOSE}") from error
    check_free(local_rank, free_bytes, total_bytes)


def check_left_alone(environment: Mapping[str, str], driver: Path) -> None:
    """Raise UserError where the machine has GPUs, torch cannot use them, and nobody said to leave them alone."""
    if not driver.exists() or environment.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1"):
        return
    reason = f"CUDA {torch.version.cuda} and the driver do not fit" if torch.version.cuda else "it is built for CPUs"
    raise UserError(
        f"this machine has NVIDIA GPUs, but torch {torch.__version__} cannot use them ({reason}): install another "
        "torch or driver, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
    )


def check_needed(environment: Mapping[str, str], load: Callable[[str], object]) -> None:
    """Raise UserError where a module does not load, or where the allocator's memory could not be shared."""
    for name in ALLOCATOR:
        if "expandable_segments:true" in environment.get(name, "").lower():
            raise UserError(f"{name}: expandable segments cannot be shared with an engine: take them out")
    for module, cure in NEEDED.items():
        try:
            load(module)
        except (ImportError, OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{module} does not load ({reason}): {cure}") from error


def check_free(device: int, free_bytes: int, total_bytes: int) -> None:
    """Raise UserError where more of a device is taken than a run can do without. Pure."""
    taken_bytes = total_bytes - free_bytes
    if taken_bytes > TAKEN_SHARE * total_bytes:
        raise UserError(
            f"GPU {device}: {taken_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB are in use by another process: "
            f"end it, or {CHOOSE}"
        )
