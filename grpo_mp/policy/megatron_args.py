"""Overrides from `training.megatron_args`: which fields of Megatron's configs they may set, and to which values."""

import dataclasses
import enum
from collections.abc import Mapping
from functools import cache
from typing import Any, get_type_hints

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from pydantic import ConfigDict, TypeAdapter, ValidationError

from grpo_mp.utils.errors import UserError, did_you_mean

HYBRID_OPTIMIZER = (  # fields of Megatron's optimizer that keeps float32 state on the host and updates it there
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "use_torch_optimizer_for_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "pin_cpu_grads",
    "pin_cpu_params",
)
ARCHITECTURE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("num_moe_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("moe_router_topk", "moe_router_num_groups", "moe_router_group_topk", "moe_router_score_function"),
    *("moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias"),
    *("normalization", "layernorm_epsilon", "activation_func", "gated_linear_unit", "add_bias_linear"),
    *("add_qkv_bias", "qk_layernorm", "rope_type", "rotary_base", "rotary_scaling_factor", "rotary_percent"),
    *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
)
RESERVED = {  # fields that the run sets itself, with what to do instead
    "tensor_model_parallel_size": "set layout.tensor",
    "pipeline_model_parallel_size": "set layout.pipeline",
    "virtual_pipeline_model_parallel_size": "set layout.virtual_pipeline",
    "context_parallel_size": "set layout.context",
    "expert_model_parallel_size": "set layout.expert",
    "expert_tensor_parallel_size": "set layout.expert_tensor",
    "sequence_parallel": "it follows from layout.tensor",
    "params_dtype": "set model.dtype",
    "pipeline_dtype": "set model.dtype",
    "bf16": "set model.dtype",
    "fp16": "set model.dtype",
    "lr": "set optimizer.lr",
    "min_lr": "set optimizer.min_lr",
    "weight_decay": "set optimizer.weight_decay",
    "adam_beta1": "set optimizer.betas",
    "adam_beta2": "set optimizer.betas",
    "adam_eps": "set optimizer.eps",
    "clip_grad": "set optimizer.clip_grad",
    "optimizer": "AdamW is the only one",
    "calculate_per_token_loss": "the loss carries its own denominator",
    "use_distributed_optimizer": "a checkpoint that any layout loads needs it",
    # Megatron would gather some weights only in the next forward pass, but a weight sync reads all of them before that.
    "overlap_param_gather": "a weight sync needs the whole weights behind an update",
    "overlap_param_gather_with_optimizer_step": "a weight sync needs the whole weights behind an update",
    **dict.fromkeys(HYBRID_OPTIMIZER, "set optimizer.offload=host"),
    "moe_enable_routing_replay": "set training.router_replay",
    **dict.fromkeys(("mtp_num_layers", "mtp_loss_scaling_factor"), "set model.mtp_loss_scaling_factor"),
    "fp8": "set training.fp8_format",
    "fp8_recipe": "blockwise is the only one",
    "fp8_param": "weights stay in model.dtype: a weight sync and checkpoints read them",
    "fp8_param_gather": "weights stay in model.dtype: a weight sync and checkpoints read them",
    "perform_initialization": "every weight is read from the checkpoint",
    **dict.fromkeys(ARCHITECTURE, "it is the model's, whose config.json says it"),
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), "engines have none, and would not agree with the policy"),
}
STATE_DTYPES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def overrides_for(megatron_args: Mapping[str, Any], config_class: type) -> dict[str, Any]:
    """Return the entries of `megatron_args` that `config_class` has, with names of dtypes and enum members resolved."""
    types = _types(config_class)
    return {name: _converted(value, types[name]) for name, value in megatron_args.items() if name in types}


def check_overrides(megatron_args: Mapping[str, Any]) -> None:
    """Refuse names that Megatron's configs lack or that the run sets itself, and values of the wrong type."""
    classes = (TransformerConfig, MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    types = {name: kind for config_class in classes for name, kind in _types(config_class).items()}
    for name, value in megatron_args.items():
        if name in RESERVED:
            raise UserError(f"training.megatron_args.{name} cannot be set: {RESERVED[name]}")
        if name not in types:
            raise UserError(f"training.megatron_args.{name}: no field of Megatron's configs{did_you_mean(name, types)}")
        _check_value(name, value, types[name])
        if name in STATE_DTYPES and value not in ("float32", "bfloat16"):
            raise UserError(
                f"training.megatron_args.{name}: {value} has factors of its own on each rank, which no other layout "
                "could load: write float32 or bfloat16"
            )
        if name in STATE_DTYPES and value != "float32" and not megatron_args.get("use_precision_aware_optimizer"):
            raise UserError(
                f"training.megatron_args.{name}={value} needs use_precision_aware_optimizer: true beside it"
            )


@cache
def _types(config_class: type) -> dict[str, Any]:
    hints = get_type_hints(config_class)
    return {field.name: hints[field.name] for field in dataclasses.fields(config_class)}


def _converted(value: Any, kind: Any) -> Any:
    if kind is torch.dtype:
        return getattr(torch, value)
    return kind[value] if _is_enum(kind) and isinstance(value, str) else value


def _check_value(name: str, value: Any, kind: Any) -> None:
    """Check that a value has the field's type. Null is accepted, except for dtypes and enums. `kind`: the type."""
    if kind is torch.dtype:
        if not isinstance(getattr(torch, str(value), None), torch.dtype):
            raise UserError(f"training.megatron_args.{name}: {value!r} is no dtype: write float32 or bfloat16")
        return
    if _is_enum(kind):
        members = kind.__members__
        if value not in members:
            known = ", ".join(members)
            raise UserError(
                f"training.megatron_args.{name}={value!r:.60}{did_you_mean(str(value), members)}: give {known}"
            )
        return
    if value is None:
        return
    try:
        TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value, strict=True)
    except ValidationError as error:
        wanted = error.errors()[0]["msg"].replace("Input should be", "give")
        raise UserError(f"training.megatron_args.{name}={value!r:.60}: {wanted}") from error


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, enum.Enum)
