"""What runs in which layout: models, layouts and cases, as data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tools.tiny.models import TINY_CONFIGS

# Small, but each width that a layout divides is there, and logits are not flat.
SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}
GROUPED = SMALL | {"head_dim": 16}
SPARSE = {"moe_intermediate_size": 32}
# A gated delta net divides by the length of its output. With wider weights some of them are so short that a difference
# of 5e-8 in the weights changes the gradient by 3e-3, on one rank as in any layout.
HYBRID = GROUPED | {"initializer_range": 0.05, "rms_norm_eps": 1e-4}
# A layer of each kind, one in a stage: for families whose layers differ by settings from those with four.
TWO_LAYERS = {"num_hidden_layers": 2}
# Small logits: a product of ratios sums the rounding of an answer's logprobs.
SHALLOW = TWO_LAYERS | {"initializer_range": 0.05}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}

DIRECT = LATENT | {"q_lora_rank": None}  # queries without a low rank
MOONLIGHT = {"n_group": 1, "topk_group": 1, "rope_scaling": None, "rope_theta": 50000.0}
# As transformers, which does not know kimi_k2, reads the published weights.
KIMI = TINY_CONFIGS["kimi_k2"] | {
    "rope_scaling": TINY_CONFIGS["kimi_k2"]["rope_scaling"] | {"beta_fast": 1.0, "factor": 64.0}
}
# Ranked by the best expert, where Megatron would rank by the best two.
GROUPS = {"topk_method": "group_limited_greedy", "n_routed_experts": 16, "n_group": 4, "topk_group": 2}

MTP = {"num_nextn_predict_layers": 1}  # and it is trained
QWEN_MTP = {"mtp_num_hidden_layers": 1}
# Sequences are longer than the original length; frequencies 2 to 4 of 8 lie between the scaled and the unscaled.
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
YARN |= {"beta_fast": 1.0, "beta_slow": 0.25}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
LORA = {"rank": 3, "alpha": 5.0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> family, and what differs from its tiny shape
    "deepseek_v3": ("deepseek_v3", SMALL | SPARSE | LATENT),
    "qwen3_moe": ("qwen3_moe", GROUPED | SPARSE),
    "shallow": ("qwen3_moe", GROUPED | SPARSE | SHALLOW),  # for what is not about layers
    "qwen3": ("qwen3", GROUPED),
    "tied": ("qwen3", GROUPED | {"tie_word_embeddings": True}),
    "odd_vocabulary": ("qwen3_moe", GROUPED | SPARSE | {"vocab_size": 163}),
    "llama": ("llama", GROUPED | {"head_dim": None}),
    "qwen2": ("qwen2", GROUPED),
    "yarn": ("qwen3", GROUPED | TWO_LAYERS | {"rope_scaling": YARN}),
    "linear": ("qwen3", GROUPED | TWO_LAYERS | {"rope_scaling": LINEAR}),
    "mixtral": ("mixtral", GROUPED | TWO_LAYERS),
    "deepseek_v2": ("deepseek_v2", SMALL | SPARSE | LATENT | GROUPS | TWO_LAYERS),
    "deepseek_v2_lite": ("deepseek_v2", SMALL | SPARSE | DIRECT | TWO_LAYERS),
    "moonlight": ("deepseek_v3", SMALL | SPARSE | DIRECT | MOONLIGHT | TWO_LAYERS),
    "kimi_k2": ("deepseek_v3", KIMI | SMALL | SPARSE | LATENT | TWO_LAYERS),
    # Most sequences are longer than the 8 keys that an indexer chooses.
    "deepseek_v32": ("deepseek_v32", SMALL | SPARSE | LATENT | TWO_LAYERS | {"index_topk": 8}),
    "glm_moe_dsa": ("glm_moe_dsa", SMALL | SPARSE | LATENT | {"index_topk": 8}),
    "glm4_moe": ("glm4_moe", GROUPED | SPARSE),
    "qwen3_next": ("qwen3_next", HYBRID | SPARSE | TWO_LAYERS),
    "qwen3_5_moe": ("qwen3_5_moe_text", HYBRID | SPARSE),
    "qwen3_5": ("qwen3_5_text", HYBRID),
    "glm4_moe_air": ("glm4_moe", GROUPED | SPARSE | {"use_qk_norm": False} | TWO_LAYERS),
    "gpt_oss": ("gpt_oss", GROUPED | {"intermediate_size": 32} | TWO_LAYERS),
    "deepseek_v3_mtp": ("deepseek_v3", SMALL | SPARSE | LATENT | MTP),
    "glm4_moe_lite_mtp": ("glm4_moe_lite", SMALL | SPARSE | LATENT | MTP | TWO_LAYERS),
    "deepseek_v32_mtp": ("deepseek_v32", SMALL | SPARSE | LATENT | MTP | TWO_LAYERS | {"index_topk": 8}),
    # Not the first layer's keys are shared: Megatron numbers the layer that predicts ahead as the first.
    "glm_moe_dsa_mtp": ("glm_moe_dsa", SMALL | SPARSE | LATENT | MTP | {"index_topk": 8, "index_topk_freq": 3}),
    "minimax_m2": ("minimax_m2", GROUPED | {"rotary_dim": 8} | TWO_LAYERS),
    "hy_v3": ("hy_v3", GROUPED | SPARSE | TWO_LAYERS),
    "hy_v3_mtp": ("hy_v3", GROUPED | SPARSE | MTP),
    "glm4_moe_mtp": ("glm4_moe", GROUPED | SPARSE | MTP | TWO_LAYERS),
    "qwen3_next_mtp": ("qwen3_next", HYBRID | SPARSE | QWEN_MTP | TWO_LAYERS),
    "qwen3_5_moe_mtp": ("qwen3_5_moe_text", HYBRID | SPARSE | QWEN_MTP),
    "qwen3_5_mtp": ("qwen3_5_text", HYBRID | QWEN_MTP | TWO_LAYERS),
}


def trains_mtp(model: str) -> bool:
    """Return whether a model has a multi-token-prediction layer, which is trained."""
    return any(counted.items() <= MODELS[model][1].items() for counted in (MTP, QWEN_MTP))


COMPARED = tuple(name for name in MODELS if name != "shallow")  # with transformers

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {  # name -> ranks, sizes
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor": 2}),  # experts: one expert-data rank per tensor rank
    "tp2_etp2": (2, {"tensor": 2, "expert_tensor": 2}),
    "tp2_ep2": (2, {"tensor": 2, "expert": 2}),
    "etp2": (2, {"expert_tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "pp2_vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "ep2": (2, {"expert": 2}),
    "cp2": (2, {"context": 2}),
    "tp2_pp2": (4, {"tensor": 2, "pipeline": 2}),
    "tp2_pp2_vpp2": (4, {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}),
    "tp2_cp2": (4, {"tensor": 2, "context": 2}),
    "tp2_dp2": (4, {"tensor": 2}),
    "cp2_pp2": (4, {"context": 2, "pipeline": 2}),
    "cp2_ep2": (4, {"context": 2, "expert": 2}),
    "ep2_pp2": (4, {"expert": 2, "pipeline": 2}),
    "ep4": (4, {"expert": 4}),
    "tp2_ep2_pp2": (4, {"tensor": 2, "expert": 2, "pipeline": 2}),
    "tp2_ep2_etp2": (4, {"tensor": 2, "expert": 2, "expert_tensor": 2}),
}
KINDS = ("deepseek_v3", "qwen3_moe", "qwen3")  # latent attention and experts, grouped attention and experts, dense
COMPUTED = ("export", "logits", "logprobs", "gradient")
DENSE_FAMILY = ("one", "tp2_pp2")
SPARSE_FAMILY = ("one", "tp2_ep2_pp2")
COMPUTED_IN = {  # model -> layouts
    "llama": DENSE_FAMILY,
    "qwen2": DENSE_FAMILY,
    "yarn": (*DENSE_FAMILY, "cp2"),
    "linear": DENSE_FAMILY,
    "mixtral": SPARSE_FAMILY,
    "deepseek_v2": SPARSE_FAMILY,
    "deepseek_v2_lite": SPARSE_FAMILY,
    "moonlight": SPARSE_FAMILY,
    "kimi_k2": SPARSE_FAMILY,
    "deepseek_v32": ("one", "tp2_ep2", "pp2", "cp2", "tp2_cp2"),
    "glm_moe_dsa": ("one", "tp2_ep2", "pp2", "cp2"),
    "glm4_moe": (*SPARSE_FAMILY, "cp2"),
    "glm4_moe_air": SPARSE_FAMILY,
    "gpt_oss": ("one", "dp2", "tp2_ep2", "cp2", "tp2_ep2_pp2"),
    "qwen3_next": SPARSE_FAMILY,
    "qwen3_5_moe": ("one", "tp2", "pp2_vpp2", "ep2", "tp2_ep2_pp2"),
    "qwen3_5": DENSE_FAMILY,
    "deepseek_v3_mtp": ("one", "pp2_vpp2", "tp2_cp2", "tp2_ep2_pp2"),
    "glm4_moe_lite_mtp": SPARSE_FAMILY,
    "deepseek_v32_mtp": ("one", "tp2_ep2"),
    "glm_moe_dsa_mtp": ("one", "tp2_ep2"),
    "minimax_m2": (*SPARSE_FAMILY, "tp2"),  # norms over the heads of all ranks
    "hy_v3": SPARSE_FAMILY,
    "hy_v3_mtp": ("one", "tp2_ep2"),
    "glm4_moe_mtp": DENSE_FAMILY,
    "qwen3_next_mtp": ("one", "tp2_ep2_pp2"),
    "qwen3_5_moe_mtp": ("one", "tp2_ep2", "pp2_vpp2"),
    "qwen3_5_mtp": DENSE_FAMILY,
}
SWEPT = {  # every layout with a model of mixed experts
    "qwen3_moe": tuple(name for name in LAYOUTS if name != "tp2_pp2_vpp2"),
    "odd_vocabulary": ("one", "tp2_ep2", "tp2_pp2_vpp2"),
    "deepseek_v3": ("one", "tp2_ep2", "etp2", "pp2_vpp2", "tp2_cp2", "cp2_ep2", "ep2_pp2", "tp2_ep2_pp2"),
    "qwen3": ("one", "dp2", "tp2", "pp2_vpp2", "cp2"),
    "tied": ("one", "tp2", "pp2", "tp2_pp2"),
}
USUAL = ("export", "logits", "logprobs", "scores", "gradient", "updates")


@dataclass(frozen=True)
class Case:
    """One model in one layout, and what is measured there."""

    model: str
    layout: str
    measures: tuple[str, ...] = USUAL
    variant: str = ""
    training: dict[str, Any] = field(default_factory=dict, hash=False)  # over the settings of every case
    saves: bool = False  # a checkpoint before the last update
    loads: str = ""  # the case that saved the checkpoint this one resumes from
    lora: bool = False  # only adapters learn

    @property
    def name(self) -> str:
        return "-".join(part for part in (self.model, self.layout, self.variant) if part)

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def sizes(self) -> dict[str, int]:
        return LAYOUTS[self.layout][1]

    @property
    def trains_mtp(self) -> bool:
        return trains_mtp(self.model)

    @property
    def rounding(self) -> float:
        """Rounding errors of updates and of adapters relative to other models.

        In a gated delta net they grow: half a unit in the last place of all weights changes its gradient by 1e-5.
        """
        return 3.0 if self.model.startswith(("qwen3_next", "qwen3_5")) else 1.0

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the cases whose results this one is compared with."""
        if self.measures == ("converted",):
            return ()
        kinds = ("family", "replayed", "indexers", "supervised", "critic", "distilled", "half")
        alone = next((name for name in kinds if name in self.measures), "")
        alone = "critic" if self.measures == ("critic_resumed",) else alone
        alone = "half" if self.measures == ("half_resumed",) else alone
        alone = "lora" if self.lora else alone
        one = "-".join(filter(None, (self.model, "one", alone)))
        plain = [f"{self.model}-one"] if alone == "indexers" else []
        return (one, *plain, *([self.loads] if self.loads else []))

    @property
    def slow(self) -> bool:
        """Is it left to the whole sweep? A newcomer's tests have a model of each kind, on one and two ranks."""
        if self.ranks > 2 or self.model not in (*KINDS, "shallow") or (self.loads and CASES[self.loads].slow):
            return True
        if self.lora:
            return (self.model, self.layout) not in QUICK_LORA
        return "family" in self.measures and self.layout not in QUICK_FAMILY


def cases_with(measure: str) -> list[Case]:
    """The cases in which something is measured; logits are not, where a pipeline passes them on."""
    return [case for case in CASES.values() if measure in case.measures]


LOADING = {  # who saved -> layouts that load
    "deepseek_v3-tp2_ep2_pp2": ("one", "tp2", "pp2_vpp2", "ep2", "ep2_pp2"),
    "deepseek_v32-tp2_ep2": ("one", "pp2"),
    "qwen3_moe-pp2_vpp2": ("one", "tp2_ep2", "dp2"),
    "tied-pp2": ("one",),
    "deepseek_v3_mtp-tp2_ep2_pp2": ("pp2_vpp2",),
    "qwen3_5_moe-tp2_ep2_pp2": ("one", "tp2"),
    "qwen3_moe-tp2_ep2-critic": ("one", "pp2"),
    "qwen3_moe-pp2_vpp2-lora": ("one", "tp2_ep2"),
    "qwen3_moe-ep2-half": ("one", "pp2_vpp2"),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "alone": {"max_tokens_per_microbatch": 1},
    "together": {"max_tokens_per_microbatch": 4096},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full", "max_tokens_per_microbatch": 60},
}
VARIED = {
    "deepseek_v3": ("one", "tp2_ep2", "pp2_vpp2", "cp2"),
    "qwen3_moe": ("ep2", "tp2_ep2_pp2"),
    "deepseek_v3_mtp": ("pp2_vpp2",),
    "glm_moe_dsa": ("one",),  # layers that share keys
}
OVERLAPPED = {"qwen3_moe": ("dp2", "pp2_vpp2"), "deepseek_v3": ("cp2_ep2",), "deepseek_v3_mtp": ("pp2_vpp2",)}
# Gradients in buckets that travel while others are computed, at the last micro-batch.
OVERLAP = {"megatron_args": {"overlap_grad_reduce": True, "bucket_size": 5000}}
Layouts = Mapping[str, tuple[str, ...]]


def each(table: Layouts, measures: Sequence[str], variant: str = "", **fields: Any) -> list[Case]:
    """Make a case of each model of a table in each of its layouts; a case that others load is saved."""
    made = [Case(model, layout, tuple(measures), variant, **fields) for model in table for layout in table[model]]
    return [replace(case, saves=case.name in LOADING) for case in made]


def computed(table: Layouts, measures: Sequence[str], *more: str) -> list[Case]:
    """Make cases, where logits are measured unless a pipeline passes them on."""
    cases = each(table, (*measures, *more))
    piped = [name for name in measures if name != "logits"]
    return [replace(case, measures=(*piped, *more)) if "pp2" in case.layout else case for case in cases]


def resumed(measure: str, variant: str, lora: bool = False) -> list[Case]:
    """Make the cases that load what cases of this kind have saved."""
    kind = variant.removesuffix("resumed").removesuffix("_")
    return [
        Case(saver.split("-")[0], layout, (measure,), variant, loads=saver, lora=lora)
        for saver, layouts in LOADING.items()
        if saver.split("-")[2:] == ([kind] if kind else [])
        for layout in layouts
    ]


SHARE = {"share_prompts": True, "max_tokens_per_microbatch": 240}  # each prompt is computed once
SHARING = {  # models of every kind of rotary embedding, latent or not
    "qwen3_moe": ("one", "dp2", "pp2_vpp2", "tp2_ep2_pp2"),
    "deepseek_v3": ("one", "tp2_ep2"),
    "moonlight": ("one",),
    "glm4_moe": ("one",),
    "llama": ("one",),
    "yarn": ("one",),
    "gpt_oss": ("one",),  # sinks and windows
    "deepseek_v3_mtp": ("one",),
}
# Every preset, and parts that no preset has: each a backward pass of its own, through two layers, but where stages need
# four. Where tokens of one sequence, samples of one update or micro-batches of one rank lie apart, and a mix.
FAMILY = {"shallow": ("one", "dp2", "cp2", "tp2_ep2"), "qwen3_moe": ("pp2_vpp2", "one")}
QUICK_FAMILY = ("one", "cp2")
REPLAYED = {  # a model of each kind of router -> layouts
    "qwen3_moe": ("one", "tp2", "cp2", "pp2_vpp2", "tp2_ep2", "cp2_ep2"),
    "deepseek_v3": ("one", "cp2", "tp2_ep2_pp2"),  # sigmoid, groups, a dense layer first
    "deepseek_v2": ("one",),
    "glm4_moe": ("one",),
    "qwen3_5_moe": ("one", "tp2"),
    "gpt_oss": ("one", "tp2_ep2"),
    "minimax_m2": ("one",),
    "hy_v3": ("one",),
    "glm4_moe_lite_mtp": ("one",),  # the layer that predicts ahead routes by itself
}
REPLAY = {"router_replay": "R3"}  # routers take experts that samples bring
REPLAY_KEYS = {"router_replay": "R3_keys"}
INDEXED = {"deepseek_v32": ("one", "tp2_ep2", "pp2", "cp2", "tp2_cp2"), "glm_moe_dsa": ("one", "pp2")}
INDEXER_COEFFICIENT = 0.3
TRAINS_INDEXERS = {"megatron_args": {"dsa_indexer_loss_coeff": INDEXER_COEFFICIENT}}
REPLAYED_KEYS = {
    "glm_moe_dsa": ("one", "tp2_ep2", "cp2", "pp2"),  # layers that share keys
    "deepseek_v32": ("one", "tp2_cp2"),
    "glm_moe_dsa_mtp": ("one", "tp2_ep2"),
}
REPLAY_SELECTIVE = REPLAY | {"recompute": "selective", "megatron_args": {"recompute_modules": ["moe"]}}
# What divides a sequence, an update, a vocabulary or experts; of one sequence to a micro-batch, and of many.
SUPERVISED = {
    "qwen3_moe": ("one", "dp2", "cp2", "pp2_vpp2", "tp2_ep2"),
    "deepseek_v3": ("one",),
    "qwen3": ("one",),
}
CRITIC = {
    "qwen3_moe": ("one", "dp2", "cp2", "pp2_vpp2", "tp2_ep2", "tp2_ep2_pp2"),
    "deepseek_v3": ("one", "tp2"),
    "glm_moe_dsa": ("one", "tp2_ep2", "cp2", "pp2"),
    "tied": ("one", "pp2"),  # a critic's embedding is tied to nothing
}
# What divides a vocabulary or a sequence, a pipeline's last stage; a padded vocabulary, a layer that predicts ahead.
DISTILLED = {
    "qwen3": ("one", "dp2", "tp2", "cp2"),
    "odd_vocabulary": ("one", "tp2_ep2", "tp2_pp2_vpp2"),
    "deepseek_v3_mtp": ("one", "tp2_cp2"),
}
CONVERTED = {  # weights that `grpo-mp convert` wrote and reads
    "deepseek_v3": ("tp2_etp2", "pp2_vpp2", "tp2_ep2_pp2"),
    "deepseek_v2": ("tp2_ep2_pp2",),
    "glm_moe_dsa": ("pp2",),
    "glm4_moe": ("tp2_ep2_pp2",),
    "qwen3_5_moe": ("tp2",),  # projections in sections
    "qwen3_moe": ("ep2", "tp2_ep2_pp2"),
    "mixtral": ("tp2_ep2_pp2",),
    "qwen3": ("one", "tp2"),
    "qwen2": ("tp2_pp2",),
    "llama": ("tp2_pp2",),
    "tied": ("pp2",),
    "odd_vocabulary": ("tp2_ep2",),
}
# Every way in which a layer with adapters is divided: by attention's heads, rows or columns; by experts, or whole.
ADAPTED = {
    "qwen3_moe": ("one", "etp2", "pp2_vpp2", "tp2_ep2", "cp2_ep2", "tp2_ep2_pp2"),
    "deepseek_v3": ("one", "tp2_ep2", "tp2_ep2_pp2"),  # latent attention, all kinds of layers
    "deepseek_v32": ("one",),
    "glm4_moe": ("one",),
    "qwen3_5": ("one", "tp2_pp2"),  # projections in sections
    "qwen3_5_moe": ("one", "tp2"),
    "qwen3_next": ("one", "tp2_pp2"),
    "mixtral": ("one",),
    "minimax_m2": ("one", "tp2"),
    "hy_v3": ("one",),
    "gpt_oss": ("one", "tp2_ep2"),  # in files, adapters of a layer's experts are stacked
    "tied": ("one", "pp2"),
}
QUICK_LORA = (
    *(("qwen3_moe", "one"), ("qwen3_moe", "etp2"), ("qwen3_moe", "pp2_vpp2")),
    *(("deepseek_v3", "one"), ("deepseek_v3", "tp2_ep2")),
)


# Only a pipeline's last stage scales a loss, and experts have an optimizer of their own where ranks divide them.
HALF = {"qwen3_moe": ("one", "ep2", "pp2_vpp2", "tp2_ep2_pp2")}
# Two cases of one layout: the first breaks on one rank while the other waits, the second must not notice.
BREAKING = [Case("qwen3", "dp2", ("broken",), "broken"), Case("qwen3", "dp2", ("logprobs",), "after_broken")]
# Replicas of all weights, of experts only by pairs of ranks, and by context.
DRIFTED = [Case("qwen3", "dp2", ("drifted",), "drifted")] + [
    Case("deepseek_v3", layout, ("drifted",), "drifted") for layout in ("ep2", "cp2_ep2")
]
# Updated, too: those that save, and a layer that predicts ahead beside gated delta nets.
UPDATED = {saver.split("-")[0] for saver in LOADING} | {"qwen3_5_moe_mtp"}
ALL = [
    *computed({"qwen3_moe": SWEPT["qwen3_moe"]}, USUAL, "full_disk", "exchange"),
    *computed({model: SWEPT[model] for model in SWEPT if model != "qwen3_moe"}, USUAL),
    *computed({model: COMPUTED_IN[model] for model in COMPUTED_IN if model in UPDATED}, COMPUTED, "updates"),
    *computed({model: COMPUTED_IN[model] for model in COMPUTED_IN if model not in UPDATED}, COMPUTED),
    *(case for name, training in VARIANTS.items() for case in each(VARIED, ["gradient"], name, training=training)),
    Case("glm_moe_dsa_mtp", "one", ("gradient",), "full", VARIANTS["full"]),  # layers that share keys run again last
    *each(SHARING, ["logprobs", "gradient"], "sharing", training=SHARE),
    Case("deepseek_v3", "one", ("gradient",), "sharing_full", SHARE | {"recompute": "full"}),
    Case("qwen3_moe", "pp2", ("gradient",), "sharing_selective", SHARE | {"recompute": "selective"}),
    *each(OVERLAPPED, ["updates"], "overlapped", training=OVERLAP),
    *each(FAMILY, ["family"], "family"),
    *each(REPLAYED, ["replayed"], "replayed", training=REPLAY),
    *each(INDEXED, ["indexers"], "indexers", training=TRAINS_INDEXERS),
    Case("glm_moe_dsa", "one", ("indexers",), "indexers_full", TRAINS_INDEXERS | {"recompute": "full"}),
    *each(REPLAYED_KEYS, ["replayed"], "replayed", training=REPLAY_KEYS),
    Case("glm_moe_dsa", "one", ("replayed",), "replayed_full", REPLAY_KEYS | {"recompute": "full"}),
    Case("deepseek_v3", "pp2_vpp2", ("replayed",), "replayed_full", REPLAY | {"recompute": "full"}),
    Case("deepseek_v3", "one", ("replayed",), "replayed_selective", REPLAY_SELECTIVE),
    Case("deepseek_v3", "tp2", ("replayed",), "replayed_shared", REPLAY | SHARE),
    *each(SUPERVISED, ["supervised"], "supervised"),
    *each(CRITIC, ["critic"], "critic"),
    Case("qwen3_moe", "tp2_ep2", ("critic",), "critic_sharing", SHARE),
    *resumed("critic_resumed", "critic_resumed"),
    *each(DISTILLED, ["distilled", "truncated", "self_taught"], "distilled"),
    Case("qwen3", "dp2", ("self_taught",), "self_taught_sharing", SHARE),
    *BREAKING,
    *DRIFTED,
    *each(HALF, ["half"], "half"),
    *resumed("half_resumed", "half_resumed"),
    *resumed("resumed", "resumed"),
    *each(CONVERTED, ["converted"], "converted"),
    *each(ADAPTED, ["adapters", "adapter_updates"], "lora", lora=True),
    *resumed("adapter_resumed", "lora_resumed", lora=True),
    Case("deepseek_v3", "one", ("adapters",), "lora_full", {"recompute": "full"}, lora=True),
]
CASES = {case.name: case for case in ALL}
