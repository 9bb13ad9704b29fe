"""Supported model families by `model_type` of config.json."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from grpo_mp.models import (
    deepseek,
    glm4_moe,
    gpt_oss,
    gqa,
    hy_v3,
    llama_qwen,
    minimax_m2,
    mixtral,
    qwen3_next,
    sparse_attention,
)
from grpo_mp.models.blocks import HF_LAYER
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param, Rule, expand
from grpo_mp.models.multi_token_prediction import HY3_NAMES, MODULE, QWEN_NAMES
from grpo_mp.utils.errors import did_you_mean
from grpo_mp.utils.registry import Registry


@dataclass(frozen=True)
class Family:
    """Megatron settings, mapping rules and rotary arguments of one architecture."""

    architecture: str
    config: Callable[[HfConfig], dict[str, Any]]
    rules: Callable[[HfConfig], list[Rule]]
    rotary: Callable[[HfConfig], dict[str, Any]] = gqa.rotary  # MLA reads rotary values from its settings instead
    group_score_topk: int = 2  # group-limited routing ranks a group by its best n scores
    norms_over_heads: bool = False  # norms of queries and keys are over all heads together
    untrained: tuple[str, ...] = ()  # first parts of names of Hugging Face tensors outside the policy
    mtp_names: Mapping[str, str] = field(default_factory=dict)  # one of multi_token_prediction, or {}
    stacks_experts: bool = (
        False  # exports hold the experts of a layer in one tensor, as transformers and SGLang read them
    )
    transformers_type: str | None = None  # model_type in transformers, if it differs from the key in FAMILIES
    text_prefix: str = ""  # of names in vision-language folders; "": model. becomes model.language_model.
    # For experts that peft does not fuse by itself: parts of names in files -> in transformers. None: peft does.
    peft_names: Mapping[str, str] | None = None
    models: str = ""  # published models and what is rejected, for the table of the README
    rejected: str = ""

    def params(self, hf: HfConfig) -> dict[str, Param]:
        """Return the Megatron parameters by name, with the names that the tensors have in the folder."""
        params = expand(self.rules(hf))
        if not (hf.is_text_part or hf.trains_mtp):
            return params
        stored = partial(self.stored_name, hf)
        return {name: replace(param, hf=tuple(map(stored, param.hf))) for name, param in params.items()}

    def stored_name(self, hf: HfConfig, name: str) -> str:
        """Return a tensor's name in the folder: of a module `mtp`, or of the text model in a vision-language model."""
        if hf.is_text_part and self.text_prefix:
            return self.text_prefix + name
        number = hf.int("num_hidden_layers")
        layer = HF_LAYER.format(layer=number)
        for ours, theirs in self.mtp_names.items():
            if name.startswith(layer + ours):
                return theirs.format(layer=number) + name.removeprefix(layer + ours)
        if hf.is_text_part and name.startswith("model."):
            return f"model.language_model.{name.removeprefix('model.')}"
        return name

    def mtp_prefix(self, hf: HfConfig) -> str:
        """Return the first part of the names of the multi-token-prediction layer's tensors in the folder."""
        return MODULE if self.mtp_is_module else HF_LAYER.format(layer=hf.int("num_hidden_layers"))

    @property
    def mtp_is_module(self) -> bool:
        """Return whether files have the multi-token-prediction layer beside the layers of the decoder."""
        return self.mtp_names == QWEN_NAMES

    def outside(self, hf: HfConfig) -> tuple[str, ...]:
        """Return the first parts of the names of tensors outside the policy, except those of whole layers."""
        return (*self.untrained, MODULE) if self.mtp_is_module and not hf.trains_mtp else self.untrained


KIMI: dict[str, Any] = {"untrained": ("vision_tower.", "mm_projector."), "text_prefix": "language_model."}
QWEN_NEXT: dict[str, Any] = {"untrained": ("model.visual.",), "mtp_names": QWEN_NAMES, "rotary": qwen3_next.rotary}

FAMILIES = {
    "qwen3": Family(
        "Qwen3ForCausalLM",
        llama_qwen.qwen3_config,
        partial(gqa.dense_rules, norms=True),
        models="Qwen3",
        rejected="sliding windows, biases",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        llama_qwen.qwen3_moe_config,
        llama_qwen.qwen3_moe_rules,
        models="Qwen3-30B-A3B, Qwen3-235B-A22B",
        rejected="sliding windows, biases",
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        qwen3_next.moe_config,
        qwen3_next.next_rules,
        **QWEN_NEXT,
        models="Qwen3-Next-80B-A3B",
        rejected="context parallelism, shared prompts",
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        qwen3_next.moe_config,
        qwen3_next.moe_rules,
        **QWEN_NEXT,
        peft_names={},
        models="text models of Qwen3.5 and later with experts",
        rejected="as Qwen3-Next",
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        qwen3_next.dense_config,
        qwen3_next.dense_rules,
        **QWEN_NEXT,
        models="dense text models of Qwen3.5 and later",
        rejected="as Qwen3-Next",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        llama_qwen.qwen2_config,
        partial(gqa.dense_rules, bias=True),
        models="Qwen2, Qwen2.5",
        rejected="sliding windows",
    ),
    "llama": Family(
        "LlamaForCausalLM", llama_qwen.llama_config, gqa.dense_rules, models="Llama 2 and 3.x", rejected="biases"
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        mixtral.config,
        mixtral.rules,
        mixtral.rotary,
        models="Mixtral 8x7B, 8x22B",
        rejected="sliding windows",
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        deepseek.v2_config,
        deepseek.v2_rules,
        group_score_topk=1,
        models="DeepSeek-V2, V2-Lite",
        rejected="biases",
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        deepseek.v3_config,
        deepseek.v3_rules,
        **KIMI,
        models="DeepSeek-V3, R1, Moonlight",
        rejected="biases",
    ),
    "kimi_k2": Family(
        "DeepseekV3ForCausalLM",
        deepseek.v3_config,
        deepseek.v3_rules,
        transformers_type="deepseek_v3",
        **KIMI,
        models="Kimi-K2, text models of K2.5 and K2.6",
        rejected="biases",
    ),
    "deepseek_v32": Family(
        "DeepseekV32ForCausalLM",
        sparse_attention.v32_config,
        sparse_attention.rules,
        models="DeepSeek-V3.2",
        rejected="biases, shared prompts, megatron-core before 0.19",
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM", glm4_moe.config, glm4_moe.rules, glm4_moe.rotary, models="GLM-4.5, GLM-4.5-Air"
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM", glm4_moe.lite_config, deepseek.v3_rules, models="GLM-4.7-Flash", rejected="biases"
    ),
    "glm_moe_dsa": Family(
        "GlmMoeDsaForCausalLM",
        sparse_attention.glm_config,
        sparse_attention.rules,
        models="GLM-5, 5.1, 5.2",
        rejected="as DeepSeek-V3.2",
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        minimax_m2.config,
        minimax_m2.rules,
        minimax_m2.rotary,
        norms_over_heads=True,
        models="MiniMax-M2, M2.1, M2.5, M2.7",
        rejected="training layers that predict ahead, which are not published",
    ),
    "hy_v3": Family(
        "HYV3ForCausalLM",
        hy_v3.config,
        hy_v3.rules,
        models="Hy3",
        mtp_names=HY3_NAMES,
        peft_names={"shared_mlp": "shared_experts"},
        rejected="biases, rope scaling",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        gpt_oss.config,
        gpt_oss.rules,
        stacks_experts=True,
        peft_names={},
        models="gpt-oss-20b, gpt-oss-120b",
        rejected="context parallelism on GPUs, expert-tensor parallelism, FP8",
    ),
}
MODEL_FAMILIES: Registry[Family] = Registry("model family", FAMILIES, instance=Family)
# Model types that transformers knows by another name.
TRANSFORMERS_NAMES = {name: family.transformers_type for name, family in FAMILIES.items() if family.transformers_type}


def family_of(hf: HfConfig) -> Family:
    """Return the family that `hf.family` names, or else the family of its model_type."""
    if hf.family is None and hf.model_type not in FAMILIES:
        raise hf.error(
            f"model_type {hf.model_type!r} is not supported"
            f"{did_you_mean(hf.model_type, FAMILIES)}; supported: {', '.join(FAMILIES)}; or set model.family"
        )
    hf.check_quantization()
    family = MODEL_FAMILIES.resolve(hf.family or hf.model_type, "model.family")
    hf.expect("architectures", [family.architecture])
    return family
