"""What an engine of this program needs beyond SGLang's own wheel. SGLang itself loads `register` in its processes.

The entry point `sglang.srt.plugins` in pyproject.toml names it. It leaves a server alone that this program did not
start; and what a CPU needs is done only where the engine was asked to run on the CPU.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_mp.platform import engine_layers
from grpo_mp.platform.engine_attention import paged_attention
from grpo_mp.platform.engine_decode import RunningSequences

SCRATCH = "GRPO_MP_ENGINE_SCRATCH"  # set where this program started the engine: a folder removed at its end


def register() -> None:
    """Called by SGLang before it builds a model, in the server, scheduler and detokenizer process alike."""
    if SCRATCH not in os.environ:
        return
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        _leave_out_megatron()
        _absorbed_latent_attention()
        _plain_rotary_of_latent_attention()
        _attention_over_whole_batches()
        _layers_in_few_operations()
        _plain_memory_for_routed_experts()
        _fork_children()
        _collect_only_what_is_new()
    _load_snapshots_in(Path(os.environ[SCRATCH]))


def _leave_out_megatron() -> None:
    # SGLang's debugging tools load it where it is installed; an engine has no use for it.
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]


def _absorbed_latent_attention() -> None:
    # torch_native attention takes one head size for keys and values, which only the absorbed form of
    # latent attention has; SGLang would otherwise choose the unabsorbed form for a prompt.
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)


def _plain_rotary_of_latent_attention() -> None:
    # SGLang's choice for latent attention on a CPU is yarn or an assertion; Moonlight has no yarn.
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.layers.rotary_embedding.factory.get_rope_cpu", _rotary, HookType.AROUND)


def _rotary(original: Callable[..., Any], *args: Any) -> Any:
    """SGLang's arguments: head size, rotary size, positions, base, style, scaling, type, share, device."""
    if args[5] is not None:
        return original(*args)
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    return get_rope(*args[:8])


def _attention_over_whole_batches() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(f"{backend}.init_forward_metadata", _begin_step)
    for phase, wrapper in (("extend", _extend), ("decode", _decode)):
        HookRegistry.register(f"{backend}._run_sdpa_forward_{phase}", wrapper, HookType.AROUND)


def _begin_step(result: None, backend: Any, batch: Any) -> None:
    backend.running = getattr(backend, "running", None) or RunningSequences()
    if not batch.forward_mode.is_decode():
        backend.running.forget()
        return
    table = backend.req_to_token_pool.req_to_token
    backend.running.step(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), table)


def _extend(original: Callable[..., Any], backend: Any, *args: Any, **options: Any) -> Any:
    """SGLang's arguments: query, output, keys, values, slots, rows, lengths, prefix lengths, new lengths, encoder."""
    query, output, keys, values, slots, rows, lengths, _, new, encoder = args
    if not _is_plain(encoder, options) or not options["causal"]:
        return original(backend, *args, **options)
    return output.copy_(
        paged_attention(query, keys, values, slots[rows], lengths.tolist(), new.tolist(), options["scaling"])
    )


def _decode(original: Callable[..., Any], backend: Any, *args: Any, **options: Any) -> Any:
    """SGLang's arguments: query, output, keys, values, slots, rows, lengths, encoder."""
    query, output, keys, values, _, _, _, encoder = args
    if not _is_plain(encoder, options):
        return original(backend, *args, **options)
    return output.copy_(backend.running.attend(query, keys, values, options["scaling"]))


def _is_plain(encoder: Any, options: dict[str, Any]) -> bool:
    return encoder is None and not options["is_cross_attn"] and options["sliding_window_size"] is None


def _layers_in_few_operations() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, wrapper in {
        "layernorm.RMSNorm.forward_native": engine_layers.rms_norm,
        "moe.fused_moe_native.moe_forward_native": engine_layers.routed_experts,
        "rotary_embedding.base.RotaryEmbedding.forward_native": engine_layers.rotary,
    }.items():
        HookRegistry.register(f"sglang.srt.layers.{name}", wrapper, HookType.AROUND)


def _plain_memory_for_routed_experts() -> None:
    # `enable_return_routed_experts` keeps the experts in host memory that SGLang registers with CUDA.
    import torch
    from sglang.srt.mem_cache.pool_host import common

    def allocate(dims: Any, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype)

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def _fork_children() -> None:
    # A spawned scheduler and detokenizer each import SGLang anew. Without a device context nothing forbids
    # fork, which shares what the server process has imported: less than half of the time and of the memory.
    import multiprocessing

    from sglang.srt.plugins.hook_registry import HookRegistry

    def set_fork(result: None, *_: Any) -> None:
        multiprocessing.set_start_method("fork", force=True)

    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", set_fork)


def _collect_only_what_is_new() -> None:
    # On a CPU every flush of the cache collects garbage: a fifth of a second, spent on what the start has made.
    import gc

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def freeze(*_: Any, **__: Any) -> None:
        gc.collect()
        gc.freeze()

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_event_loop", freeze, HookType.BEFORE)


def _load_snapshots_in(scratch: Path) -> None:
    # Every SGLang server leaves one of these in /dev/shm for good.
    from sglang.srt.plugins.hook_registry import HookRegistry

    def move(path: str, *_: Any) -> str:
        return str(scratch / Path(path).name)

    HookRegistry.register("sglang.srt.managers.load_snapshot.shm_path_for", move)
