"""Everything that differs between CUDA and CPU.

Call `prepare()` before anything imports Megatron. On a CPU it makes the stock megatron-core importable and gives it CPU
modules under TransformerEngine's names. The other functions work on both kinds of device.
"""

import contextlib
import ctypes
import gc
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import torch

PINNED = "pinned_max_cached_size_mb"  # torch neither rounds up nor caches larger pinned allocations


def on_cuda() -> bool:
    """Return whether this process computes on a CUDA device."""
    return torch.cuda.is_available()


def default_dtype() -> str:
    """Return the precision of model.dtype=null on this machine."""
    return "bfloat16" if on_cuda() else "float32"


def compute_capability() -> float | None:
    """Return the compute capability of this process's GPU, as 9.0 of an H100; None on a CPU."""
    return float(".".join(map(str, torch.cuda.get_device_capability()))) if on_cuda() else None


def prepare() -> None:
    """Make megatron-core importable on this machine. Call it before Megatron is imported; more calls are harmless."""
    # Megatron relies on one hardware queue to order communication before kernels.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # TransformerEngine's context parallelism else sends pair by pair, and each pair has a communicator of its own.
    os.environ.setdefault("NVTE_BATCH_MHA_P2P_COMM", "1")
    # Communicators of NVLink's multicast keep their memory when NCCL suspends them (NVIDIA/nccl#2337).
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if on_cuda():
        torch._C._accelerator_setAllocatorSettings(allocator_settings(os.environ))
        return
    # A CUDA build of torch warns where it sees CUDA's compiler and no device.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from grpo_mp.platform.import_hook import install_import_hook
    from grpo_mp.platform.megatron_patches import AFTER_IMPORT

    install_import_hook(AFTER_IMPORT)


def allocator_settings(environment: Mapping[str, str]) -> str:
    """Return the user's allocator settings without rounding of pinned memory, which would add a third."""
    settings = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return settings if PINNED in settings else ",".join(filter(None, (settings, f"{PINNED}:1")))


def device() -> torch.device:
    """Return the device of this rank's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda() else torch.device("cpu")


def backend() -> str:
    """Return the torch.distributed backend for this device."""
    return "nccl" if on_cuda() else "gloo"


def synchronize() -> None:
    """Wait until the device has finished all queued work."""
    if on_cuda():
        torch.cuda.synchronize()


def free_device_memory() -> None:
    """Return cached, unused memory to the device (on a CPU to the operating system)."""
    if on_cuda():
        gc.collect()
        torch.cuda.ipc_collect()  # memory that engines have unmapped
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def gc_frozen() -> Iterator[None]:
    """Exclude all present objects from garbage collection inside."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def host_bytes() -> int:
    """Return the resident host memory of this process."""
    return int(psutil.Process().memory_info().rss)


def reset_peak_device_bytes() -> None:
    """Reset `torch.cuda.max_memory_allocated`."""
    if on_cuda():
        torch.cuda.reset_peak_memory_stats()


def free_device_bytes() -> int:
    """Return the free memory of the device; on a CPU the available host memory."""
    return torch.cuda.mem_get_info()[0] if on_cuda() else int(psutil.virtual_memory().available)


def used_device_bytes() -> int:
    """Return the memory of the device that any process uses; 0 on a CPU."""
    if not on_cuda():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def megatron_fields(interleaved: bool, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Megatron's configs that this device requires.

    `interleaved`: a virtual pipeline is used. `model`: the fields that describe the model.
    """
    if on_cuda():
        return fused_fields(model)
    fusions = (
        "apply_rope_fusion",
        "masked_softmax_fusion",
        "bias_dropout_fusion",
        "bias_activation_fusion",
        "gradient_accumulation_fusion",
        "cross_entropy_loss_fusion",
        "moe_permute_fusion",
        "persist_layer_norm",
    )
    # gloo matches point-to-point messages by order only, so a batch of them can be paired wrongly; and
    # it may still read an output that the schedule has already deallocated.
    pipeline = {"batch_p2p_comm": False, "overlap_p2p_comm": interleaved, "deallocate_pipeline_outputs": False}
    return dict.fromkeys(fusions, False) | {"use_cpu_initialization": True} | pipeline


def fp8_fields(fp8_format: str | None, recipe: str) -> dict[str, Any]:
    """Return the fields of Megatron's config for FP8. On a CPU the layers compute it themselves (see fp8_linear).

    TransformerEngine's copies of the weights in FP8 are not kept between micro-batches: they would stay on the GPU
    while the policy leaves it for the engines.
    """
    if fp8_format is None or not on_cuda():
        return {}
    return {"fp8": fp8_format, "fp8_recipe": recipe, "disable_parameter_transpose_cache": True}


def fused_fields(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config fields that turn on Megatron's fused kernels for a model on CUDA.

    Unfused, the rotary embedding of packed sequences synchronizes with the device four times per layer and pass, to
    read their lengths. For latent attention Megatron fuses it with yarn only; yarn of factor 1 is the plain one.
    """
    fields: dict[str, Any] = {"apply_rope_fusion": True}
    if model.get("num_moe_experts"):
        fields["moe_permute_fusion"] = True
    if model.get("multi_latent_attention") and model["rope_type"] == "rope":
        fields |= {"rope_type": "yarn", "rotary_scaling_factor": 1.0}
    return fields
