"""Is this rank's GPU there, and free? On a CPU there is nothing to check."""

import torch

from grpo_mp import platform
from grpo_mp.errors import UserError

TAKEN_SHARE = 0.2  # of the memory; a CUDA context, or a screen, takes less
CHOOSE = "choose other GPUs (CUDA_VISIBLE_DEVICES)"


def check_device(local_rank: int) -> None:
    """Raise UserError where the GPU of this rank is missing, cannot be used or is in use by somebody else."""
    if not platform.on_cuda():
        return
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(f"the {local_rank + 1} ranks of this node need a GPU each, it shows {count}: start fewer ranks")
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info(local_rank)
    except RuntimeError as error:
        raise UserError(f"GPU {local_rank} cannot be used ({error}): mend it, or {CHOOSE}") from error
    check_free(local_rank, free_bytes, total_bytes)


def check_free(device: int, free_bytes: int, total_bytes: int) -> None:
    """Raise UserError where more of a device is taken than a run can do without. Pure."""
    taken_bytes = total_bytes - free_bytes
    if taken_bytes > TAKEN_SHARE * total_bytes:
        raise UserError(
            f"GPU {device}: {taken_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB are in use by another process: "
            f"end it, or {CHOOSE}"
        )
