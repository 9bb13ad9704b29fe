"""What differs between CUDA and CPU, and nothing else.

Call `prepare()` before anything imports Megatron. On a CPU it lets the
stock megatron-core load and gives it CPU modules under TransformerEngine's names. The other functions
answer the same questions on both kinds of device.
"""

import contextlib
import ctypes
import gc
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import torch

PINNED = "pinned_max_cached_size_mb"  # above it torch's allocator of pinned memory neither rounds nor keeps


def on_cuda() -> bool:
    """Whether this process computes on a CUDA device."""
    return torch.cuda.is_available()


def prepare() -> None:
    """Make megatron-core importable on this machine. Safe to call again; call it before a device is used.

    Raises RuntimeError where there is no CUDA and Megatron was imported before this call.
    """
    # Megatron orders its communication before its kernels by having one hardware queue.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if on_cuda():
        torch._C._accelerator_setAllocatorSettings(allocator_settings(os.environ))
        return
    from grpo_mp.platform.import_hook import install_import_hook
    from grpo_mp.platform.megatron_patches import AFTER_IMPORT

    install_import_hook(AFTER_IMPORT)


def allocator_settings(environment: Mapping[str, str]) -> str:
    """torch's allocator as the user set it, but for pinned host memory: of its size, and given back when it is freed.

    torch rounds it up to powers of two and keeps it: of the policy's weights and optimizer that is a third too much.
    """
    given = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return given if PINNED in given else ",".join(filter(None, (given, f"{PINNED}:1")))


def device() -> torch.device:
    """The device that holds this rank's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda() else torch.device("cpu")


def backend() -> str:
    """The torch.distributed backend for this device."""
    return "nccl" if on_cuda() else "gloo"


def synchronize() -> None:
    """Wait until the device has done all work given to it."""
    if on_cuda():
        torch.cuda.synchronize()


def free_device_memory() -> None:
    """Give memory that no tensor uses back to the device (to the operating system on a CPU)."""
    if on_cuda():
        gc.collect()
        torch.cuda.ipc_collect()  # what engines have mapped and let go
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def spared_collections() -> Iterator[None]:
    """Inside, leave what is there now, plans of millions of objects among it, out of garbage collections.

    At its end an interpreter must find what its libraries hold: they complain of what is still frozen.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def host_bytes() -> int:
    """Resident host memory of this process now."""
    return int(psutil.Process().memory_info().rss)


def peak_host_bytes() -> int:
    """Highest resident host memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_bytes() -> int:
    """Device memory that this process's tensors use now; 0 on a CPU, where host memory is all there is."""
    return torch.cuda.memory_allocated() if on_cuda() else 0


def peak_device_bytes() -> int:
    """Highest device memory of this process's tensors since the last `reset_peak_device_bytes`; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() if on_cuda() else 0


def cached_bytes() -> float:
    """Device memory that this process keeps without using it."""
    return float(torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) if on_cuda() else 0.0


def reset_peak_device_bytes() -> None:
    """Start a new measurement of `peak_device_bytes`."""
    if on_cuda():
        torch.cuda.reset_peak_memory_stats()


def free_device_bytes() -> int:
    """Memory that the device can still give to any process; the available host memory on a CPU."""
    return torch.cuda.mem_get_info()[0] if on_cuda() else int(psutil.virtual_memory().available)


def megatron_fields(interleaved: bool, model: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Megatron's configs that this device demands.

    `interleaved`: a virtual pipeline is used. `model`: the fields that describe the model.
    """
    if on_cuda():
        return fused_fields(model)
    kernels = ("apply_rope_fusion", "masked_softmax_fusion", "bias_dropout_fusion", "bias_activation_fusion")
    more = ("gradient_accumulation_fusion", "cross_entropy_loss_fusion", "moe_permute_fusion", "persist_layer_norm")
    # gloo matches point-to-point messages by order alone, so a batch of them can be paired wrongly; and
    # it may still read an output that the schedule has already deallocated.
    pipeline = {"batch_p2p_comm": False, "overlap_p2p_comm": interleaved, "deallocate_pipeline_outputs": False}
    return dict.fromkeys(kernels + more, False) | {"use_cpu_initialization": True} | pipeline


def fused_fields(model: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's fused kernels for a model on CUDA. Pure.

    Unfused, the rotary embedding of packed sequences asks the device for their lengths twice for queries and twice for
    keys, in every layer and pass. For latent attention Megatron fuses it with yarn alone; yarn of factor 1 is the plain
    embedding.
    """
    fields: dict[str, Any] = {"apply_rope_fusion": True}
    if model.get("num_moe_experts"):
        fields["moe_permute_fusion"] = True
    if model.get("multi_latent_attention") and model["rope_type"] == "rope":
        fields |= {"rope_type": "yarn", "rotary_scaling_factor": 1.0}
    return fields
