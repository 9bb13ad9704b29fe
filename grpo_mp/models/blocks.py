"""Mapping rules and Megatron settings that several families share: embeddings, norms, MLPs, experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule

MCORE_LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."


def base_config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings that all pre-norm RMSNorm/SwiGLU decoders share."""
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


def moe_config(hf: HfConfig, num_experts: int, width: int) -> dict[str, Any]:
    """Return the Megatron settings of dropless MoE layers without a load-balancing loss."""
    return {
        "num_moe_experts": num_experts,
        "moe_router_topk": hf.int("num_experts_per_tok"),
        "moe_ffn_hidden_size": width,
        "moe_router_dtype": "fp32",
        # In RL the reward alone shapes routing.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def embedding_and_head(hf: HfConfig) -> list[Rule]:
    """Map token embedding, final norm and output layer. The last stage holds a copy of a tied embedding."""
    embedding = "model.embed_tokens.weight"
    shape = (hf.int("vocab_size"), hf.int("hidden_size"))
    output = embedding if hf.tied else "lm_head.weight"
    return [
        Rule("embedding.word_embeddings.weight", (embedding,), (shape,), tp_dim=0, vocabulary=True),
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",), (shape[1:],)),
        Rule("output_layer.weight", (output,), (shape,), tp_dim=0, vocabulary=True, alias=hf.tied),
    ]


def mlp(
    hf: HfConfig, layers: Sequence[int], width: int, prefix: str = "mlp.", hf_prefix: str | None = None
) -> list[Rule]:
    """Map the gate, up and down projections of an MLP of `width`.

    `prefix`: path of the MLP in Megatron's layer; `hf_prefix`: in the Hugging Face layer, if it differs.
    """
    names = tuple(HF_LAYER + (hf_prefix or prefix) + name for name in ("gate_proj", "up_proj", "down_proj"))
    return _projections(MCORE_LAYER + prefix, names, hidden=hf.int("hidden_size"), width=width, layers=layers)


def _projections(
    mcore: str, hf_names: tuple[str, ...], hidden: int, width: int, layers: Sequence[int], experts: int = 0
) -> list[Rule]:
    gate, up, down = (name + ".weight" for name in hf_names)
    weight = "weight{expert}" if experts else "weight"
    in_layers: dict[str, Any] = {"layers": layers, "experts": experts}
    shapes = ((width, hidden), (width, hidden))
    return [
        Rule(f"{mcore}linear_fc1.{weight}", (gate, up), shapes, tp_dim=0, **in_layers),
        Rule(f"{mcore}linear_fc2.{weight}", (down,), ((hidden, width),), tp_dim=1, **in_layers),
    ]


def dense_mlp(hf: HfConfig, layers: Sequence[int]) -> list[Rule]:
    """Map a dense MLP and the norm before it, which Megatron fuses into the first projection."""
    norm = Rule(
        MCORE_LAYER + "mlp.linear_fc1.layer_norm_weight",
        (HF_LAYER + "post_attention_layernorm.weight",),
        ((hf.int("hidden_size"),),),
        layers=layers,
    )
    return [norm, *mlp(hf, layers, hf.int("intermediate_size"))]


@dataclass(frozen=True)
class ExpertNames:
    """Hugging Face names of a layer's MoE block, of an expert's three projections, and of the router."""

    moe_block: str = "mlp."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    bias: bool = False  # the router and all projections of experts have biases


DEFAULT_NAMES = ExpertNames()


def experts(
    hf: HfConfig, layers: Sequence[int], num_experts: int, width: int, names: ExpertNames = DEFAULT_NAMES
) -> list[Rule]:
    """Map the router, the norm before it, and `num_experts` routed experts of `width`."""
    hidden = hf.int("hidden_size")
    norm = MCORE_LAYER + "pre_mlp_layernorm.weight"
    hf_norm = HF_LAYER + "post_attention_layernorm.weight"
    mcore = MCORE_LAYER + "mlp."
    block = HF_LAYER + names.moe_block
    expert = tuple(block + "experts.{expert}." + name for name in (names.gate, names.up, names.down))
    router = block + names.router
    in_layers: dict[str, Any] = {"layers": layers, "experts": num_experts}
    gate_up = tuple(name + ".bias" for name in expert[:2])
    down = (expert[2] + ".bias",)
    biases = [
        Rule(mcore + "router.bias", (router + ".bias",), ((num_experts,),), layers=layers),
        Rule(mcore + "experts.linear_fc1.bias{expert}", gate_up, ((width,), (width,)), tp_dim=0, **in_layers),
        Rule(mcore + "experts.linear_fc2.bias{expert}", down, ((hidden,),), **in_layers),
    ]
    return [
        Rule(norm, (hf_norm,), ((hidden,),), layers=layers),
        Rule(mcore + "router.weight", (router + ".weight",), ((num_experts, hidden),), layers=layers),
        *_projections(mcore + "experts.", expert, hidden=hidden, width=width, layers=layers, experts=num_experts),
        *(biases if names.bias else []),
    ]
