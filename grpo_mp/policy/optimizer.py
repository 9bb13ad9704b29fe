"""Megatron's distributed optimizer and its learning-rate schedule, counted in optimizer updates."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from grpo_mp.config.sections import LayoutConfig, OptimizerConfig
from grpo_mp.policy.adam_state import HostState, init_state
from grpo_mp.policy.megatron_config import ddp_config, keeps_state_on_host, optimizer_config
from grpo_mp.policy.model import PolicyModel
from grpo_mp.policy.parameter_bytes import OPTIMIZER_PIECE_BYTES


def wrap_for_training(
    layout: LayoutConfig, megatron_args: Mapping[str, Any], config: TransformerConfig, chunks: Sequence[PolicyModel]
) -> list[DistributedDataParallel]:
    """Wrap every chunk in Megatron's DDP, which sums gradients over data- and context-parallel ranks."""
    config.finalize_model_grads_func = _sum_gradients
    for chunk in chunks:
        _mark_expert_gradients(layout, chunk)
        if megatron_args.get("gradient_accumulation_fusion", True):
            # TransformerEngine's layers then add weight gradients to the float32 gradient buffers without rounding.
            # Megatron's own switch requires apex for the output layer, whose backward pass is not used here.
            for module in chunk.modules():
                weights = module.parameters(recurse=False)
                if hasattr(module, "fuse_wgrad_accumulation") and all(weight.requires_grad for weight in weights):
                    module.fuse_wgrad_accumulation = True
    wrapped = [
        DistributedDataParallel(
            config, ddp_config(megatron_args), Float16Module(config, chunk) if config.bf16 or config.fp16 else chunk
        )
        for chunk in chunks
    ]
    # Overlapped gradient reduction starts at the last micro-batch.
    config.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    return wrapped


def build_optimizer(
    settings: OptimizerConfig,
    dtype: str,
    megatron_args: Mapping[str, Any],
    total_updates: int,
    chunks: list[DistributedDataParallel],
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Build the optimizer of all chunks and its learning-rate schedule, which counts optimizer updates."""
    optimizer = get_megatron_optimizer(optimizer_config(settings, dtype, megatron_args), chunks)
    for part in optimizer.chained_optimizers:
        if keeps_state_on_host(settings):
            part.optimizer.step = HostState(part.optimizer, OPTIMIZER_PIECE_BYTES).step
        else:
            init_state(part)
    return optimizer, _schedule(optimizer, settings, total_updates)


def take_loss_scaler(optimizer: MegatronOptimizer) -> MegatronGradScaler | None:
    """Remove the loss scaler from all parts of the optimizer and return it; return None without loss scaling.

    Megatron scales the loss by the first part's scaler only, but each part, of dense or of expert parameters, would
    divide by its own, which sees only this part's overflows.
    """
    scaler = None
    for part in reversed(optimizer.chained_optimizers):
        scaler = getattr(part, "grad_scaler", None)
        part.grad_scaler = None
    return scaler


def _mark_expert_gradients(layout: LayoutConfig, chunk: PolicyModel) -> None:
    """Mark the expert parameters whose gradients are reduced over the expert-data-parallel group.

    Megatron marks them only with expert parallelism. If the expert-tensor size differs from the tensor size, it would
    silently leave out the sum over tensor-parallel ranks.
    """
    expert_group = layout.expert > 1 or layout.expert_tensor != layout.tensor
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            parameter.allreduce = not expert_group


def _schedule(optimizer: MegatronOptimizer, settings: OptimizerConfig, total_updates: int) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr / (settings.warmup_updates + 1),  # with 0 the first update would have no effect
        max_lr=settings.lr,
        min_lr=min(settings.min_lr, settings.lr),
        lr_warmup_steps=settings.warmup_updates,
        lr_decay_steps=max(total_updates, settings.warmup_updates + 1),
        lr_decay_style=settings.lr_schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a resumed run follows its settings, not its checkpoint
    )


def _sum_gradients(model: list[torch.nn.Module], num_tokens: Any = None, **groups: Any) -> None:
    # Without a token count Megatron does not divide: the loss is already divided by its denominator.
    finalize_model_grads(model, None, **groups)
