"""What a plan is made for: settings, a model's shape, and the machines."""

from dataclasses import dataclass
from typing import Any

from grpo_mp.config import Settings
from grpo_mp.distributed.coordinates import data_parallel
from grpo_mp.distributed.layout import check_layout, model_shape
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.planner.clusters import Cluster
from grpo_mp.planner.packing import Lengths, Packing, pack_update
from grpo_mp.planner.parameter_count import Count, local_parameter_counts
from grpo_mp.planner.stages import Stages, stage_layers
from grpo_mp.rollout.placement import engine_placements


@dataclass(frozen=True)
class Shape:
    """Widths that computation and caches follow from. `sparse`: per layer, whether it is a mixture."""

    hidden: int
    vocabulary: int
    heads: int
    query_width: int  # of one head
    value_width: int
    kv_heads: int
    latent_width: int  # elements of a token's latent cache in one layer; 0 without latent attention
    dense_width: int
    sparse: tuple[bool, ...]
    experts: int
    experts_per_token: int
    expert_width: int
    shared_width: int

    @property
    def layers(self) -> int:
        return len(self.sparse)


@dataclass(frozen=True)
class Job:
    """Settings on machines. `counts`: parameters of one rank of each stage; `response_tokens`: the mean assumed."""

    settings: Settings
    hf: HfConfig
    shape: Shape
    cluster: Cluster
    nodes: int
    gpus_per_node: int
    stages: Stages
    counts: tuple[Count, ...]
    response_tokens: float

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def data_parallel(self) -> int:
        return data_parallel(self.settings.layout, self.world_size)

    @property
    def dense_shards(self) -> int:
        """Ranks over which the optimizer of a dense parameter is divided."""
        return self.data_parallel * self.settings.layout.context

    @property
    def expert_shards(self) -> int:
        layout = self.settings.layout
        return self.world_size // (layout.expert * layout.expert_tensor * layout.pipeline)

    @property
    def engines(self) -> int:
        engine = self.settings.engine
        return engine.count or self.world_size // engine.gpus

    @property
    def moves(self) -> bool:
        """Whether policy and engine leave the device for each other; a float32 policy stays."""
        return self.settings.model.dtype == "bfloat16"

    @property
    def has_reference(self) -> bool:
        return self.settings.algorithm.kl.measured_share > 0

    @property
    def longest(self) -> int:
        rollout = self.settings.rollout
        return rollout.max_prompt_tokens + rollout.max_response_tokens

    @property
    def longest_request(self) -> int:
        """Tokens of the longest sequence of an engine, which answers the eval sets too."""
        return self.settings.rollout.max_prompt_tokens + self.settings.longest_response

    @property
    def mean_tokens(self) -> float:
        """Of a sample; prompts are taken as half of their limit."""
        return self.settings.rollout.max_prompt_tokens / 2 + self.response_tokens

    @property
    def microbatch_tokens(self) -> int:
        """The most tokens of one micro-batch: a longer sequence gets one of its own."""
        of_update = self.settings.samples_per_step // self.settings.optimizer.updates_per_step * self.longest
        return min(max(self.settings.optimizer.max_tokens_per_microbatch, self.longest), of_update)

    @property
    def packing(self) -> Packing:
        """An update as the scheduler packs it, for lognormal responses of the assumed mean."""
        settings, layout = self.settings, self.settings.layout
        rollout, optimizer = settings.rollout, settings.optimizer
        samples = max(1, settings.samples_per_step // optimizer.updates_per_step)
        lengths = Lengths(
            samples,
            max(1, rollout.max_prompt_tokens // 2),
            self.response_tokens,
            rollout.max_response_tokens,
            rollout.group_size if optimizer.share_prompts else 0,
        )
        divided = layout.model_copy(update={"expert": 1, "expert_tensor": 1})  # of no meaning here
        return pack_update(lengths, divided, self.data_parallel, optimizer.max_tokens_per_microbatch, self.shape.hidden)


def make_job(
    settings: Settings,
    hf: HfConfig,
    cluster: Cluster,
    nodes: int,
    gpus_per_node: int | None = None,
    response_tokens: float | None = None,
) -> Job:
    """The job, with parameters by the closed form. Raises UserError for a layout or engine that cannot be."""
    gpus_per_node = gpus_per_node or cluster.gpus_per_node
    world_size, layout, engine = nodes * gpus_per_node, settings.layout, settings.engine
    values = family_of(hf).config(hf)
    megatron = settings.optimizer.megatron
    check_layout(layout, model_shape(values), world_size, uneven_pipeline=any("pipeline" in name for name in megatron))
    engine_placements(world_size, gpus_per_node, engine.gpus, engine.count)
    stages = stage_layers(values["num_layers"], layout, megatron)
    return Job(
        settings=settings,
        hf=hf,
        shape=_shape(hf, values),
        cluster=cluster,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        stages=stages,
        counts=local_parameter_counts(hf, layout, stages),
        response_tokens=response_tokens or settings.rollout.max_response_tokens / 2,
    )


def _shape(hf: HfConfig, values: dict[str, Any]) -> Shape:
    latent, experts = values.get("multi_latent_attention", False), values.get("num_moe_experts") or 0
    per_head = values["qk_head_dim"] + values["qk_pos_emb_head_dim"] if latent else values["kv_channels"]
    sparse = values["moe_layer_freq"] if experts else [0] * values["num_layers"]
    return Shape(
        hidden=values["hidden_size"],
        vocabulary=hf.int("vocab_size"),
        heads=values["num_attention_heads"],
        query_width=per_head,
        value_width=values["v_head_dim"] if latent else per_head,
        kv_heads=values["num_query_groups"],
        latent_width=values["kv_lora_rank"] + values["qk_pos_emb_head_dim"] if latent else 0,
        dense_width=values.get("ffn_hidden_size") or 0,
        sparse=tuple(map(bool, sparse)),
        experts=experts,
        experts_per_token=values.get("moe_router_topk") or 0,
        expert_width=values.get("moe_ffn_hidden_size") or 0,
        shared_width=values.get("moe_shared_expert_intermediate_size") or 0,
    )
