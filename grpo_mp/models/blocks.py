"""Rules and Megatron settings that many families share: embeddings, norms, MLPs, experts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule

MEGATRON = "decoder.layers.{layer}."
HF = "model.layers.{layer}."


def base_config(hf: HfConfig) -> dict[str, Any]:
    """Megatron settings that every pre-norm RMSNorm/SwiGLU decoder shares."""
    return {
        "num_layers": hf.int("num_hidden_layers"),
        "hidden_size": hf.int("hidden_size"),
        "num_attention_heads": hf.int("num_attention_heads"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.float("rms_norm_eps"),
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def moe_config(hf: HfConfig, experts: int, width: int) -> dict[str, Any]:
    """Megatron settings of a dropless mixture of experts; no balancing loss: RL leaves routing to the reward."""
    return {
        "num_moe_experts": experts,
        "moe_router_topk": hf.int("num_experts_per_tok"),
        "moe_ffn_hidden_size": width,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def ends(hf: HfConfig) -> list[Rule]:
    """Token embedding, final norm and output layer; a tied output layer is a copy that the last stage keeps."""
    embedding, vocabulary = "model.embed_tokens.weight", (hf.int("vocab_size"), hf.int("hidden_size"))
    output = embedding if hf.tied else "lm_head.weight"
    return [
        Rule("embedding.word_embeddings.weight", (embedding,), (vocabulary,), split=0, vocabulary=True),
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",), (vocabulary[1:],)),
        Rule("output_layer.weight", (output,), (vocabulary,), split=0, vocabulary=True, alias=hf.tied),
    ]


def mlp(hf: HfConfig, layers: Iterable[int], width: int, here: str = "mlp.", there: str = "mlp.") -> list[Rule]:
    """gate, up and down projections of `width`."""
    hidden, layers = hf.int("hidden_size"), tuple(layers)
    return [
        Rule(
            MEGATRON + here + "linear_fc1.weight",
            (HF + there + "gate_proj.weight", HF + there + "up_proj.weight"),
            ((width, hidden), (width, hidden)),
            fuse="gate_up",
            split=0,
            layers=layers,
        ),
        Rule(
            MEGATRON + here + "linear_fc2.weight",
            (HF + there + "down_proj.weight",),
            ((hidden, width),),
            split=1,
            layers=layers,
        ),
    ]


def dense_mlp(hf: HfConfig, layers: Iterable[int]) -> list[Rule]:
    """A dense MLP with its norm fused into the first projection."""
    layers = tuple(layers)
    norm = Rule(
        MEGATRON + "mlp.linear_fc1.layer_norm_weight",
        (HF + "post_attention_layernorm.weight",),
        ((hf.int("hidden_size"),),),
        layers=layers,
    )
    return [norm, *mlp(hf, layers, hf.int("intermediate_size"))]


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls the mixture of a layer, and the three projections of an expert."""

    mixture: str = "mlp."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


USUAL = ExpertNames()


def experts(hf: HfConfig, layers: Iterable[int], count: int, width: int, names: ExpertNames = USUAL) -> list[Rule]:
    """Router, its norm, and `count` routed experts of `width`."""
    hidden, layers = hf.int("hidden_size"), tuple(layers)
    here, there = MEGATRON + "mlp.", HF + names.mixture
    return [
        Rule(
            MEGATRON + "pre_mlp_layernorm.weight",
            (HF + "post_attention_layernorm.weight",),
            ((hidden,),),
            layers=layers,
        ),
        Rule(here + "router.weight", (there + "gate.weight",), ((count, hidden),), layers=layers),
        Rule(
            here + "experts.linear_fc1.weight{expert}",
            tuple(there + "experts.{expert}." + name + ".weight" for name in (names.gate, names.up)),
            ((width, hidden), (width, hidden)),
            fuse="gate_up",
            split=0,
            layers=layers,
            experts=count,
        ),
        Rule(
            here + "experts.linear_fc2.weight{expert}",
            (there + "experts.{expert}." + names.down + ".weight",),
            ((hidden, width),),
            split=1,
            layers=layers,
            experts=count,
        ),
    ]
