"""Build Megatron's config objects from the settings and their `training.megatron_args`."""

import dataclasses
import enum
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, get_type_hints

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from pydantic import ConfigDict, TypeAdapter, ValidationError

from grpo_mp import platform
from grpo_mp.config import sections
from grpo_mp.config.sections import LayoutConfig, TrainingConfig
from grpo_mp.distributed.layout import PIPELINE_LAYOUT, check_stages
from grpo_mp.distributed.process_groups import megatron_sizes
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.policy.sparse_attention import check_megatron
from grpo_mp.utils.errors import UserError, did_you_mean

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Values of PyTorch's GradScaler. From Megatron's first scale, 2**32, a run would skip its first updates one by one.
LOSS_SCALING = {"initial_loss_scale": 2.0**16, "hysteresis": 1}

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
ARCHITECTURE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("num_moe_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("moe_router_topk", "moe_router_num_groups", "moe_router_group_topk", "moe_router_score_function"),
    *("moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias"),
    *("normalization", "layernorm_epsilon", "activation_func", "gated_linear_unit", "add_bias_linear"),
    *("add_qkv_bias", "qk_layernorm", "rope_type", "rotary_base", "rotary_scaling_factor", "rotary_percent"),
    *("softmax_scale", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("glu_linear_offset", "activation_func_clamp_value", "softmax_type", "window_size", "window_attn_skip_freq"),
    *("experimental_attention_variant", "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
)
NEWER_ARCHITECTURE = (  # fields from megatron-core 0.19 on
    *("dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset", "dsa_indexer_rope_interleaved"),
    *("dsa_indexer_scoring_relu", "dsa_indexer_k_norm_epsilon"),
)
ATTRIBUTES = ("position_embedding_type", "yarn_")  # GPTModel reads them from the config, which has no such fields
LAYOUT = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
ADAM = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
RESERVED: dict[str, str] = {  # fields that the run sets itself, with what to do instead
    **{name: f"set layout.{size}" for size, name in zip(LAYOUT, megatron_sizes(LayoutConfig()), strict=True)},
    "sequence_parallel": "it follows from layout.tensor",
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), "set model.dtype"),
    **dict.fromkeys(ADAM, "set the fields of the section optimizer"),
    "optimizer": "AdamW is the only one",
    "calculate_per_token_loss": "the loss carries its own denominator",
    "use_distributed_optimizer": "a checkpoint that any layout loads needs it",
    # Megatron would gather some weights only in the next forward pass, but a weight sync reads all of them before that.
    "overlap_param_gather": "a weight sync needs the whole weights behind an update",
    "overlap_param_gather_with_optimizer_step": "a weight sync needs the whole weights behind an update",
    "optimizer_cpu_offload": "set optimizer.offload=host",
    "moe_enable_routing_replay": "set training.router_replay",
    **dict.fromkeys(("mtp_num_layers", "mtp_loss_scaling_factor"), "set model.mtp_loss_scaling_factor"),
    **{"fp8": "set training.fp8_format", "fp8_recipe": "blockwise is the only one"},
    **dict.fromkeys(("fp8_param", "fp8_param_gather"), "a weight sync and checkpoints read weights in model.dtype"),
    "perform_initialization": "every weight is read from the checkpoint",
    **dict.fromkeys((*ARCHITECTURE, *NEWER_ARCHITECTURE), "config.json of the model sets it"),
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), "engines have none, and would not agree with the policy"),
}
# With these the precision-aware optimizer has the state of the ordinary one: whole main weights, here in Adam's state.
WHOLE_STATE = {"use_precision_aware_optimizer": True, "store_param_remainders": False}


def transformer_config(layout: LayoutConfig, training: TrainingConfig, dtype: str, hf: HfConfig) -> TransformerConfig:
    """Build the model's config. `hf`: its Hugging Face config."""
    family = family_of(hf).config(hf)
    config_class = MLATransformerConfig if family.get("multi_latent_attention") else TransformerConfig
    values = family | _numerics(DTYPES[dtype]) | RECOMPUTE[training.recompute] | _layout(layout)
    if "glu_linear_offset" in family:
        values["activation_func"] = quick_gelu
    values |= platform.megatron_fields(layout.virtual_pipeline is not None, family)
    values |= platform.fp8_fields(training.fp8_format)
    values |= overrides_for(training.megatron_args, config_class)
    if hf.trains_mtp:
        values |= _multi_token_prediction(hf, values)
    is_sparse = values.get("experimental_attention_variant") == "dsa"
    if training.share_prompts and values.get("experimental_attention_variant"):
        reason = "sparse attention chooses keys in" if is_sparse else "linear attention has a state of"
        raise UserError(
            f"training.share_prompts=true: in {hf.model_type} {reason} each sequence, which others cannot share: set "
            "it to false"
        )
    if is_sparse:
        check_megatron(hf)
    attributes = {name: values.pop(name) for name in [*values] if name.startswith(ATTRIBUTES)}
    try:
        config = config_class(**values)
    except (ValueError, AssertionError, TypeError) as error:
        raise UserError(f"Megatron refuses this model, layout and training.megatron_args: {error}") from error
    vars(config).update(attributes)
    if config.virtual_pipeline_model_parallel_size != layout.virtual_pipeline:  # pipeline_model_parallel_layout sets it
        check_stages(layout, layout.pipeline * (config.virtual_pipeline_model_parallel_size or 1))
    if hf.trains_mtp:
        _check_last_stage(config)
    return config


def check_fp8(training: TrainingConfig, dtype: str) -> None:
    """Refuse FP8 training without a GPU or in another dtype than bfloat16. TransformerEngine checks the GPU's type."""
    if training.fp8_format and not (platform.on_cuda() and dtype == "bfloat16"):
        raise UserError(
            f"training.fp8_format={training.fp8_format} needs a GPU and model.dtype=bfloat16: set it to null on a CPU"
        )


def _multi_token_prediction(hf: HfConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"mtp_num_layers": hf.policy_layers - hf.int("num_hidden_layers")}
    stages = values.get(PIPELINE_LAYOUT)
    if isinstance(stages, str) and "m" not in stages:
        return fields | {PIPELINE_LAYOUT: f"{stages.removesuffix('L')}mL"}
    if isinstance(stages, list) and not any("mtp" in chunk for chunk in stages):
        return fields | {PIPELINE_LAYOUT: [*stages[:-1], [*stages[-1][:-1], "mtp", *stages[-1][-1:]]]}
    return fields


def _check_last_stage(config: TransformerConfig) -> None:
    stages = config.pipeline_model_parallel_layout
    kinds = {kind.name for kind in stages.layout[-1][-1]} if stages else {"decoder", "mtp"}
    if config.num_layers_in_last_pipeline_stage == 0 or not {"decoder", "mtp"} <= kinds:
        raise UserError(
            "training.megatron_args places the multi-token-prediction layer apart from the last decoder layers: give "
            "the last stage both, as in Et*3|t*3mL"
        )


def ddp_config(megatron_args: Mapping[str, Any]) -> DistributedDataParallelConfig:
    """Build the config of DistributedDataParallel with the distributed optimizer and float32 gradient reduction."""
    values: dict[str, Any] = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": True,
    }
    return DistributedDataParallelConfig(**values | overrides_for(megatron_args, DistributedDataParallelConfig))


def optimizer_config(
    optimizer: sections.OptimizerConfig, dtype: str, megatron_args: Mapping[str, Any]
) -> OptimizerConfig:
    """Build the config of AdamW, sharded over data-parallel ranks."""
    values: dict[str, Any] = {
        "optimizer": "adam",
        "lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_eps": optimizer.eps,
        "clip_grad": optimizer.clip_grad,
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        **LOSS_SCALING,
        "params_dtype": DTYPES[dtype],
        "use_distributed_optimizer": True,
    }
    overrides = overrides_for(megatron_args, OptimizerConfig)
    if keeps_state_on_host(optimizer) and not overrides.get("use_precision_aware_optimizer"):
        overrides |= WHOLE_STATE
    return OptimizerConfig(**values | overrides)


def keeps_state_on_host(optimizer: sections.OptimizerConfig) -> bool:
    """Return whether optimizer state stays in host memory and is copied to the GPU for updates; False on a CPU."""
    return optimizer.offload == "host" and platform.on_cuda()


def _layout(layout: LayoutConfig) -> dict[str, Any]:
    interleaved = layout.virtual_pipeline is not None
    return megatron_sizes(layout) | {
        "sequence_parallel": layout.tensor > 1,
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "deallocate_pipeline_outputs": True,
    }


def _numerics(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "activation_func": torch.nn.functional.silu,
        "attention_softmax_in_fp32": True,
        "calculate_per_token_loss": True,
        "perform_initialization": False,  # every weight is read from the checkpoint
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "gradient_accumulation_fusion": False,  # needs apex for the output layer; see wrap_for_training
        "cuda_graph_scope": [],  # Megatron warns about its own default
    }


def check_overrides(megatron_args: Mapping[str, Any]) -> None:
    """Refuse names that Megatron's configs lack or that the run sets itself, and values of the wrong type."""
    classes = (TransformerConfig, MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    types = {name: kind for config_class in classes for name, kind in _types(config_class).items()}
    for name, value in megatron_args.items():
        if name in RESERVED:
            raise UserError(f"training.megatron_args.{name} cannot be set: {RESERVED[name]}")
        if (name, value) == ("moe_token_dispatcher_type", "flex"):
            sentence = "Megatron cannot import the locked DeepEP: set alltoall"
            raise UserError(f"training.megatron_args.{name}=flex: {sentence}")
        if name not in types:
            raise UserError(f"training.megatron_args.{name}: no field of Megatron's configs{did_you_mean(name, types)}")
        try:
            _adapter(types[name]).validate_python(value, strict=True)
        except ValidationError as error:
            wanted = error.errors()[0]["msg"].replace("Input should be", "give")
            raise UserError(f"training.megatron_args.{name}={value!r:.60}: {wanted}") from error


def overrides_for(megatron_args: Mapping[str, Any], config_class: type) -> dict[str, Any]:
    """Return the entries of `megatron_args` that `config_class` has, with names of dtypes and enum members resolved."""
    types = _types(config_class)
    return {name: _converted(value, types[name]) for name, value in megatron_args.items() if name in types}


def _converted(value: Any, kind: Any) -> Any:
    if kind is torch.dtype:
        return getattr(torch, value)
    return kind[value] if _is_enum(kind) and isinstance(value, str) else value


@cache
def _types(config_class: type) -> dict[str, Any]:
    hints = get_type_hints(config_class)
    return {field.name: hints[field.name] for field in dataclasses.fields(config_class)}


def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the check of a field's value in YAML: null, or a value of the type `kind`; dtypes and enums by name."""
    if kind is torch.dtype:
        return TypeAdapter(Literal["float32", "bfloat16"])
    if _is_enum(kind):
        return TypeAdapter(Literal[tuple(kind.__members__)])  # type: ignore[arg-type]
    return TypeAdapter(kind | None, config=ConfigDict(arbitrary_types_allowed=True))


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, enum.Enum)
