"""Rules for layouts, with their error messages, and the model dimensions they divide."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.coordinates import data_parallel_size
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.sparse_attention import indexer_layers
from grpo_mp.utils.errors import UserError

# Fields of Megatron's TransformerConfig that place the layers on pipeline stages.
FIRST_STAGE_LAYERS = "num_layers_in_first_pipeline_stage"
LAST_STAGE_LAYERS = "num_layers_in_last_pipeline_stage"
PIPELINE_LAYOUT = "pipeline_model_parallel_layout"
PLACEMENT_FIELDS = {
    FIRST_STAGE_LAYERS,
    LAST_STAGE_LAYERS,
    PIPELINE_LAYOUT,
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
}


@dataclass(frozen=True)
class LinearShape:
    """Dimensions of gated delta nets. `layers`: the layers that have one in place of attention."""

    layers: frozenset[int]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    window: int  # of the convolution, in tokens

    @property
    def channels(self) -> int:
        """Return the channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_elements(self) -> int:
        """Return the elements of the state of one sequence in one layer."""
        return self.value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True)
class IndexerShape:
    """Dimensions of the indexers that choose `topk` keys for sparse attention. `layers`: the layers that have one."""

    layers: frozenset[int]
    heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of the model, from which divisibility, FLOPs, activations and caches follow."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    qk_head_dim: int
    v_head_dim: int
    num_kv_heads: int
    mla_cache_dim: int  # elements per token and layer of the latent KV cache; 0 without MLA
    ffn_hidden_size: int
    is_moe_layer: tuple[bool, ...]  # by layer
    num_experts: int
    experts_per_token: int
    moe_ffn_hidden_size: int  # of one routed expert
    shared_expert_size: int  # of all shared experts together
    linear: LinearShape | None = None
    window_layers: int = 0  # layers of attention with a sliding window
    window_tokens: int = 0  # keys of a query there, its own included
    indexer: IndexerShape | None = None  # of sparse attention

    @property
    def num_layers(self) -> int:
        return len(self.is_moe_layer)

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers - (len(self.linear.layers) if self.linear else 0)

    @property
    def num_moe_layers(self) -> int:
        return sum(self.is_moe_layer)

    def attended_tokens(self, length: float) -> float:
        """Return twice the mean number of keys of a query in a sequence of `length`, summed over attention layers.

        Causal attention has length / 2 of them, with a window or a choice of w < length w - w^2 / (2 length).
        """
        layers, keys = self.limited_attention
        window = min(keys, length)
        windowed = window * (2 - window / length) if window else 0.0
        return (self.num_attention_layers - layers) * length + layers * windowed

    @property
    def limited_attention(self) -> tuple[int, int]:
        """Return how many layers limit the keys of a query, by a window or an indexer, and the limit in keys."""
        if self.indexer:
            return self.num_attention_layers, self.indexer.topk
        return self.window_layers, self.window_tokens

    @property
    def shares_keys(self) -> bool:
        """Return whether some layers attend to the keys that another layer's indexer chose."""
        return self.indexer is not None and len(self.indexer.layers) < self.num_layers

    @property
    def attention_width(self) -> int:
        """Return the elements of a key and a value together in one head; sparse attention multiplies latents."""
        return 2 * self.mla_cache_dim if self.indexer else self.qk_head_dim + self.v_head_dim

    @property
    def ffn_widths(self) -> tuple[int, ...]:
        dense = () if all(self.is_moe_layer) else (self.ffn_hidden_size,)
        return (*dense, self.shared_expert_size) if self.shared_expert_size else dense


def model_shape(hf: HfConfig) -> ModelShape:
    """Derive the model's dimensions from its family's Megatron config."""
    config = family_of(hf).config(hf)
    mla = config.get("multi_latent_attention", False)
    num_experts = config.get("num_moe_experts") or 0
    qk_head_dim = config.get("kv_channels") or config["hidden_size"] // config["num_attention_heads"]
    if mla:
        qk_head_dim = config["qk_head_dim"] + config["qk_pos_emb_head_dim"]
    moe_layer_freq = config["moe_layer_freq"] if num_experts else [0] * config["num_layers"]
    return ModelShape(
        hidden_size=config["hidden_size"],
        vocab_size=hf.int("vocab_size"),
        num_heads=config["num_attention_heads"],
        qk_head_dim=qk_head_dim,
        v_head_dim=config["v_head_dim"] if mla else qk_head_dim,
        num_kv_heads=config["num_query_groups"],
        mla_cache_dim=config["kv_lora_rank"] + config["qk_pos_emb_head_dim"] if mla else 0,
        ffn_hidden_size=config.get("ffn_hidden_size") or 0,
        is_moe_layer=tuple(map(bool, moe_layer_freq)),
        num_experts=num_experts,
        experts_per_token=config.get("moe_router_topk") or 0,
        moe_ffn_hidden_size=config.get("moe_ffn_hidden_size") or 0,
        shared_expert_size=config.get("moe_shared_expert_intermediate_size") or 0,
        linear=_linear_shape(config),
        window_layers=sum(config.get("window_attn_skip_freq") or ()),
        window_tokens=config["window_size"][0] + 1 if config.get("window_size") else 0,
        indexer=_indexer_shape(hf, config),
    )


def _indexer_shape(hf: HfConfig, config: Mapping[str, Any]) -> IndexerShape | None:
    if "dsa_indexer_topk" not in config:
        return None
    return IndexerShape(
        frozenset(indexer_layers(hf)),
        heads=config["dsa_indexer_n_heads"],
        head_dim=config["dsa_indexer_head_dim"],
        topk=config["dsa_indexer_topk"],
    )


def _linear_shape(config: Mapping[str, Any]) -> LinearShape | None:
    kinds = config.get("linear_attention_freq")
    if not kinds:
        return None
    return LinearShape(
        frozenset(layer for layer, is_linear in enumerate(kinds) if is_linear),
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        window=config["linear_conv_kernel_dim"],
    )


def sets_pipeline_layout(megatron: Mapping[str, Any]) -> bool:
    """Return whether training.megatron_args assigns layers to pipeline stages."""
    return not PLACEMENT_FIELDS.isdisjoint(megatron)


def critic_layout(layout: LayoutConfig, model: ModelShape) -> LayoutConfig:
    """Return the policy's layout adapted to its critic, without expert parallelism if the critic has no experts."""
    return layout if model.num_experts else layout.model_copy(update={"expert": 1, "expert_tensor": 1})


def check_stages(layout: LayoutConfig, count: int) -> None:
    """Raise UserError unless `count` stages match layout.pipeline and layout.virtual_pipeline."""
    expected = layout.pipeline * (layout.virtual_pipeline or 1)
    if count != expected:
        raise UserError(
            f"training.megatron_args places the layers on {count} stages, layout.pipeline={layout.pipeline} with "
            f"layout.virtual_pipeline={layout.virtual_pipeline or 'null'} has {expected}: write as many stages"
        )


def layout_violations(
    layout: LayoutConfig, model: ModelShape, world_size: int, uneven_pipeline: bool = False
) -> Iterator[str]:
    """Yield one message for each rule that the layout breaks.

    `uneven_pipeline`: Megatron's own fields assign the layers, so they need not divide evenly.
    """
    if world_size % layout.model_parallel:
        yield f"tensor x context x pipeline = {layout.model_parallel} does not divide the {world_size} ranks"
    sparse = layout.expert_tensor * layout.expert * layout.pipeline
    if world_size % sparse:
        yield f"expert_tensor x expert x pipeline = {sparse} does not divide the {world_size} ranks"
    for name, size in (("attention heads", model.num_heads), ("query groups", model.num_kv_heads)):
        if size % layout.tensor:
            yield f"tensor={layout.tensor} does not divide the {size} {name}"
    if model.linear and model.linear.key_heads % (layout.tensor * layout.context):
        ranks = layout.tensor * layout.context
        yield f"tensor x context = {ranks} does not divide the {model.linear.key_heads} key heads of linear attention"
    for width in model.ffn_widths:
        if width % layout.tensor:
            yield f"tensor={layout.tensor} does not divide the MLP width {width}"
    chunks = layout.pipeline * (layout.virtual_pipeline or 1)
    if not uneven_pipeline and model.num_layers % chunks:
        yield f"pipeline x virtual_pipeline = {chunks} does not divide the {model.num_layers} layers"
    if layout.virtual_pipeline and layout.pipeline == 1:
        yield "virtual_pipeline needs pipeline > 1"
    if not model.num_experts:
        if layout.expert > 1 or layout.expert_tensor > 1:
            yield "expert and expert_tensor must be 1: the model has no experts"
        return
    if model.num_experts % layout.expert:
        yield f"expert={layout.expert} does not divide the {model.num_experts} experts"
    if model.moe_ffn_hidden_size % layout.expert_tensor:
        yield f"expert_tensor={layout.expert_tensor} does not divide the expert width {model.moe_ffn_hidden_size}"


def check_layout(
    layout: LayoutConfig, model: ModelShape, world_size: int, uneven_pipeline: bool = False, setting: str = "layout"
) -> None:
    """Raise UserError with the first broken rule and, if the world size is wrong, the number of ranks to start."""
    violation = next(layout_violations(layout, model, world_size, uneven_pipeline), None)
    if violation is None:
        return
    ranks = lcm(layout.model_parallel, layout.expert_tensor * layout.expert * layout.pipeline)
    advice = (
        f"start {ranks} ranks or a multiple (grpo-mp train CONFIG --ranks {ranks}), or " if world_size % ranks else ""
    )
    raise UserError(f"{setting}: {violation}: {advice}choose other sizes ({describe(layout)})")


def divisors(number: int) -> list[int]:
    """List the divisors of a number in ascending order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def describe(layout: LayoutConfig) -> str:
    """Format the layout as in the settings file: 'tensor=2, pipeline=1, ...'."""
    return ", ".join(f"{name}={value}" for name, value in layout.model_dump().items() if value is not None)


def describe_parallelism(layout: LayoutConfig, world_size: int) -> str:
    """Format the layout with its data-parallel size on `world_size` ranks: 'tensor=2, ..., data=4'."""
    return f"{describe(layout)}, data={data_parallel_size(layout, world_size)}"
