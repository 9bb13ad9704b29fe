"""SGLang plugin (entry point `sglang.srt.plugins` in pyproject.toml) with the patches that our engines need.

It does nothing in servers that this program did not start.
"""

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_mp.platform import engine_gated_delta, engine_layers, engine_sparse
from grpo_mp.platform.engine_attention import paged_attention, shared_plan
from grpo_mp.platform.engine_invariance import enable_batch_invariance
from grpo_mp.platform.packed_attention import Softmax
from grpo_mp.utils.files import ENGINE_SCRATCH
from grpo_mp.utils.processes import write_stacks_on_signal


def register() -> None:
    """Apply the patches. SGLang calls this in all its processes, before it builds a model."""
    if ENGINE_SCRATCH not in os.environ:
        return
    write_stacks_on_signal(Path(os.environ[ENGINE_SCRATCH]))
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = [*HOOKS]
    # SGLang's debugging tools would import Megatron and TransformerEngine, which take time and memory in each process.
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        _patch_cpu_engine()
        hooks += CPU_HOOKS
    for target, kind, hook in hooks:
        HookRegistry.register(f"sglang.{target}", hook, HookType(kind))


def _move_load_snapshot(path: str, *_: Any) -> str:
    # SGLang would leave this file in /dev/shm, where nobody deletes it.
    return str(Path(os.environ[ENGINE_SCRATCH], Path(path).name))


def zero_score_bias(model: torch.nn.Module, *_: Any, **__: Any) -> None:
    """Set the bias of a reward head to zero before weights are loaded; SGLang's Qwen classes do not initialize it."""
    bias = getattr(getattr(model, "score", None), "bias", None)
    if isinstance(bias, torch.Tensor):
        with torch.no_grad():
            bias.zero_()


def _patch_cpu_engine() -> None:
    from sglang.srt.arg_groups import choices, model_hook
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    engine_gated_delta.install()
    # torch_native attention requires equal head sizes of keys and values, which only absorbed latent attention has.
    # SGLang would prefill with the unabsorbed form.
    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    # SGLang refuses torch_native for GPT-OSS here, because it has no sinks; `_keep_options` adds them.
    backends = model_hook.attention_backends_of
    model_hook.attention_backends_of = lambda view: tuple(
        name.replace("torch_native", "triton") for name in backends(view)
    )
    # SGLang's own allocator, used for `enable_return_routed_experts`, registers the host memory with CUDA.
    common.ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, **_: torch.empty(dims, dtype=dtype)
    # When SGLang releases or resumes memory, it synchronizes the device that torch was built for, even without a GPU.
    get_device_module = torch.get_device_module
    torch.get_device_module = lambda device="cpu": get_device_module(device)  # type: ignore[assignment]


def _murmur_hash32(original: Callable[..., Any], *inputs: torch.Tensor) -> torch.Tensor:
    """Replace SGLang's Triton kernel: return 32-bit MurmurHash3 values [R, V].

    `inputs`: seeds [R], positions [R] and vocabulary columns [V].
    """
    mask = 0xFFFFFFFF
    seed = inputs[0].to(torch.int64)[:, None]
    blocks = (seed & mask, (seed >> 32) & mask, inputs[1].to(torch.int64)[:, None], inputs[2].to(torch.int64)[None])
    hashed = torch.zeros_like(seed)
    for block in blocks:
        mixed = (block * 0xCC9E2D51) & mask
        mixed = (_rotated(mixed, 15) * 0x1B873593) & mask
        hashed = (_rotated(hashed ^ mixed, 13) * 5 + 0xE6546B64) & mask
    hashed = hashed ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & mask
    return hashed ^ (hashed >> 16)


def _replace_operators(original: Callable[..., Any], runner: Any) -> None:
    if _is_deterministic():
        runner.operators = enable_batch_invariance()
    elif torch.get_num_threads() > 1 and runner.model_config.hidden_size >= engine_layers.SHARED_HIDDEN_SIZE:
        runner.operators = engine_layers.share_products_among_threads()


def _is_deterministic() -> bool:
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().deterministic.enable_deterministic_inference)


def _rotated(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & 0xFFFFFFFF


def _get_rope_cpu(original: Callable[..., Any], *args: Any) -> Any:
    """Replace SGLang's rotary factory for CPUs, which requires yarn for latent attention, if the model has none."""
    if args[5] is not None:
        return original(*args)
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    return get_rope(*args[:8])


def _drop_plans(original: Callable[..., Any], backend: Any, *args: Any) -> Any:
    """Drop the attention batches of the last forward pass before SGLang prepares the next one."""
    backend.plans = {}
    return original(backend, *args)


def _attend(original: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace SGLang's attention of prefill and decode. `slots` [R, L]: cache slots by request, indexed by `rows`."""
    query, output, keys, values, slots, rows, lengths, *of_prefill, encoder_lengths = args
    if encoder_lengths is not None or kwargs["is_cross_attn"] or (of_prefill and not kwargs["causal"]):
        return original(backend, *args, **kwargs)
    new_lengths = of_prefill[1] if of_prefill else torch.ones_like(lengths)
    softmax = _softmax(backend, kwargs)
    layer = (query.shape[1], keys.shape[1], softmax.window)
    plan = shared_plan(backend.plans, layer, slots[rows], lengths, new_lengths)
    if backend.selected is not None:
        plan = engine_sparse.restrict(plan, backend.selected)
    return output.copy_(paged_attention(query, (keys, values), plan, softmax))


def _softmax(backend: Any, layer: Mapping[str, Any]) -> Softmax:
    before = layer["sliding_window_size"]  # SGLang's windows do not count the query's own key
    return Softmax(layer["scaling"], None if before is None else before + 1, backend.sinks)


def _keep_options(
    original: Callable[..., Any],
    backend: Any,
    *args: Any,
    sinks: Any = None,
    topk_indices: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Replace the attention of a layer, to pass its sinks and its selected keys on to `_attend`."""
    backend.sinks = sinks
    backend.selected = topk_indices
    return original(backend, *args, **kwargs)


def _use_dtype_for_sinks(model: torch.nn.Module, *_: Any, **__: Any) -> None:
    # SGLang's sinks are in bfloat16 whatever the dtype of the model.
    for name, sinks in model.named_parameters():
        if name.endswith(".sinks"):
            sinks.data = sinks.data.to(torch.get_default_dtype())


def _set_fork(result: None, *_: Any) -> None:
    # Spawned scheduler and detokenizer processes would import SGLang again. Without a CUDA context they can be forked,
    # which takes less than half of the time and memory.
    multiprocessing.set_start_method("fork", force=True)


def _freeze_gc(*_: Any, **__: Any) -> None:
    # On a CPU, every cache flush runs the garbage collector. It takes 0.2 s, mostly for objects created at the start.
    gc.collect()
    gc.freeze()


ATTENTION = "srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
HOOKS: list[tuple[str, str, Callable[..., Any]]] = [  # name in sglang, kind of hook, hook
    ("srt.managers.load_snapshot.shm_path_for", "after", _move_load_snapshot),
    ("srt.model_loader.loader._initialize_model", "after", zero_score_bias),
]
CPU_HOOKS: list[tuple[str, str, Callable[..., Any]]] = [
    ("srt.layers.sampler.murmur_hash32", "around", _murmur_hash32),
    (
        "srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
        "around",
        _replace_operators,
    ),
    ("srt.layers.rotary_embedding.factory.get_rope_cpu", "around", _get_rope_cpu),
    ("srt.model_loader.loader._initialize_model", "after", _use_dtype_for_sinks),
    ("srt.model_loader.loader._initialize_model", "around", engine_sparse.build_model),
    ("srt.configs.model_config.is_deepseek_dsa", "around", engine_sparse.is_sparse),
    ("srt.state_capturer.indexer_topk.create_indexer_capturer", "around", engine_sparse.create_capturer),
    (f"{ATTENTION}.init_forward_metadata", "around", _drop_plans),
    (f"{ATTENTION}.forward_extend", "around", _keep_options),
    (f"{ATTENTION}.forward_decode", "around", _keep_options),
    (f"{ATTENTION}._run_sdpa_forward_extend", "around", _attend),
    (f"{ATTENTION}._run_sdpa_forward_decode", "around", _attend),
    ("srt.layers.layernorm.RMSNorm.forward_native", "around", engine_layers.rms_norm_forward),
    ("srt.models.minimax_m2.MiniMaxM2QKRMSNorm.forward", "around", engine_layers.norms_over_heads),
    ("srt.layers.moe.fused_moe_native.moe_forward_native", "around", engine_layers.routed_experts),
    ("srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native", "around", engine_layers.rotary),
    ("kernels.ops.attention.fla.layernorm_gated.RMSNorm.forward", "around", engine_gated_delta.gated_norm_forward),
    (
        "kernels.ops.attention.fla.fused_norm_gate.FusedRMSNormGated.forward",
        "around",
        engine_gated_delta.gated_norm_forward,
    ),
    (
        "kernels.ops.elementwise.elementwise._launch_fused_gate_sigmoid_mul",
        "around",
        engine_gated_delta.gate_shared_expert,
    ),
    ("srt.entrypoints.engine._set_envs_and_config", "after", _set_fork),
    ("srt.managers.scheduler.Scheduler.run_event_loop", "before", _freeze_gc),
]
