"""All differences between CUDA and CPU.

`prepare()` must run before anything imports Megatron. On a CPU it makes the unmodified megatron-core importable, with
CPU modules in place of TransformerEngine's. The other functions work on both kinds of device.
"""

import contextlib
import ctypes
import gc
import logging
import os
import resource
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import torch

PINNED = "pinned_max_cached_size_mb"  # allocator setting: larger pinned allocations are neither rounded up nor cached
OPEN_FILES = 65536  # a rank has sockets to other ranks and to engines; the usual limit is 1024


def on_cuda() -> bool:
    """Return whether this process computes on a CUDA device."""
    return torch.cuda.is_available()


def default_dtype() -> str:
    """Return the dtype that model.dtype=null means on this machine."""
    return "bfloat16" if on_cuda() else "float32"


def compute_capability() -> float | None:
    """Return the compute capability of this process's GPU, such as 9.0 for an H100; None on a CPU."""
    return float(".".join(map(str, torch.cuda.get_device_capability()))) if on_cuda() else None


def prepare() -> None:
    """Set environment variables and limits and, on a CPU, install the import hook for Megatron.

    It must be called before Megatron is imported. Further calls have no effect.
    """
    warnings.filterwarnings("ignore", "Could not determine rank")  # by Megatron, in a command without ranks
    # With one hardware queue, kernels start in launch order: Megatron relies on that to start communication first.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Otherwise TransformerEngine's context parallelism creates a communicator for each pair of ranks.
    os.environ.setdefault("NVTE_BATCH_MHA_P2P_COMM", "1")
    # Communicators with NVLink multicast (NVLS) keep their memory when NCCL suspends them (NVIDIA/nccl#2337).
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if resource.RLIM_INFINITY != soft < open_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, hard))
    if on_cuda():
        settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        if PINNED not in settings:
            # Otherwise pinned memory is rounded up to powers of two, which adds about a third.
            torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (settings, f"{PINNED}:1"))))
        return
    # A CUDA build of torch warns if it finds nvcc but no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from grpo_mp.platform.import_hook import install_import_hook
    from grpo_mp.platform.megatron_patches import AFTER_IMPORT

    install_import_hook(AFTER_IMPORT)


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
        torch.cuda.ipc_collect()  # frees memory that was shared with engines and that they have unmapped
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def gc_frozen() -> Iterator[None]:
    """Inside the context, exclude all objects that exist at its start from garbage collection."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def host_bytes() -> int:
    """Return the resident host memory of this process [bytes]."""
    return int(psutil.Process().memory_info().rss)


def reset_peak_device_bytes() -> None:
    """Reset `torch.cuda.max_memory_allocated`."""
    if on_cuda():
        torch.cuda.reset_peak_memory_stats()


def free_device_bytes() -> int:
    """Return the free memory of the device [bytes]; on a CPU the available host memory."""
    return torch.cuda.mem_get_info()[0] if on_cuda() else int(psutil.virtual_memory().available)


def used_device_bytes() -> int:
    """Return the device memory that all processes use together [bytes]; 0 on a CPU."""
    if not on_cuda():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def megatron_fields(interleaved: bool, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig that depend on the device.

    `interleaved`: whether a virtual pipeline is used; `model`: the config fields that describe the model.
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
    # gloo matches point-to-point messages by order only, so batched messages can be paired wrongly. It may also still
    # read an output when the schedule deallocates it.
    pipeline = {"batch_p2p_comm": False, "overlap_p2p_comm": interleaved, "deallocate_pipeline_outputs": False}
    return dict.fromkeys(fusions, False) | {"use_cpu_initialization": True} | pipeline


def fp8_fields(fp8_format: str | None) -> dict[str, Any]:
    """Return the FP8 fields of Megatron's config; {} without FP8, and on a CPU."""
    if fp8_format is None or not on_cuda():
        return {}
    # FP8 copies of the weights, cached between micro-batches, would stay in GPU memory while engines generate.
    return {"fp8": fp8_format, "fp8_recipe": "blockwise", "disable_parameter_transpose_cache": True}


def fused_fields(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config fields that enable Megatron's fused kernels on CUDA. `model`: fields that describe the model.

    Without fusion, the rotary embedding of packed sequences synchronizes with the device four times per layer and pass.
    For latent attention Megatron fuses only yarn; yarn with factor 1 equals plain rotary. That kernel takes heads in
    blocks of a power of two and does not mask the last block: other numbers of heads would overwrite foreign memory.
    With sparse attention Megatron refuses it, and without kernels computes the scores of all pairs of tokens.
    """
    latent = bool(model.get("multi_latent_attention"))
    is_sparse = model.get("experimental_attention_variant") == "dsa"
    fuses = not latent or (model["num_attention_heads"].bit_count() == 1 and not is_sparse)
    fields: dict[str, Any] = {"apply_rope_fusion": fuses}
    if is_sparse:
        fields["dsa_kernel_backend"] = "tilelang"  # which SGLang installs
    if model.get("add_bias_linear"):
        fields["bias_dropout_fusion"] = False  # TEGroupedMLP refuses it with biases of experts
    if model.get("num_moe_experts"):
        fields["moe_permute_fusion"] = True
    if fuses and latent and model["rope_type"] == "rope":
        fields |= {"rope_type": "yarn", "rotary_scaling_factor": 1.0}
    return fields
