"""MiniMax-M2: norms over all heads of queries and of keys, partial rotary embedding, sigmoid routing in every layer."""

from typing import Any

from grpo_mp.models import blocks, gqa, shared_experts
from grpo_mp.models.blocks import HF_LAYER, MCORE_LAYER
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule
from grpo_mp.models.mixtral import NAMES


def config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of MiniMax-M2. `WholeNormAttention` adds the norms."""
    hf.expect("hidden_act", "silu")
    hf.expect("scoring_func", "sigmoid")
    hf.expect("qk_norm_type", "per_layer")
    for key in ("use_qk_norm", "use_routing_bias"):  # transformers has both always, engines only if they are named
        if hf.get(key) is not True:
            raise hf.error(f"{key} is not true: engines would compute something else than transformers: set it to true")
    if hf.trains_mtp:
        raise hf.error(
            "the layers of MiniMax-M2 that predict ahead are not published: set model.mtp_loss_scaling_factor to 0"
        )
    return (
        blocks.base_config(hf)
        | gqa.config(hf)  # with qk_layernorm, Megatron would add up the ranks' parts of the norms' gradients
        | blocks.moe_config(hf, hf.int("num_local_experts"), hf.int("intermediate_size"))
        | shared_experts.sigmoid_routing(hf)
        | {"moe_layer_freq": [1] * hf.int("num_hidden_layers")}
    )


def rules(hf: HfConfig) -> list[Rule]:
    """Return the mapping rules of MiniMax-M2. Each rank has the part of a norm's weight that belongs to its heads."""
    layers = range(hf.int("num_hidden_layers"))
    experts = hf.int("num_local_experts")
    heads = {"q": hf.int("num_attention_heads"), "k": hf.int("num_key_value_heads")}
    return [
        *blocks.embedding_and_head(hf),
        *gqa.rules(hf, layers),
        *(
            Rule(
                MCORE_LAYER + f"self_attention.{x}_layernorm.weight",
                (HF_LAYER + f"self_attn.{x}_norm.weight",),
                ((count * hf.head_dim,),),
                tp_dim=0,
                layers=layers,
            )
            for x, count in heads.items()
        ),
        *blocks.experts(hf, layers, experts, hf.int("intermediate_size"), NAMES),
        shared_experts.expert_bias(layers, experts, NAMES.moe_block + "e_score_correction_bias"),
    ]


def rotary(hf: HfConfig) -> dict[str, Any]:
    """Return the rotary arguments of Megatron's GPTModel. Engines read `rotary_dim` only."""
    arguments = gqa.rotary(hf, percent=hf.int("rotary_dim") / hf.head_dim)
    if arguments["rotary_percent"] * hf.head_dim != hf.int("rotary_dim"):
        raise hf.error("rotary_dim and partial_rotary_factor contradict each other: set both as the weights have them")
    return arguments
