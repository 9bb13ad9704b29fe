"""A planned job: settings, model dimensions and machines, and the quantities that follow from them alone."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import exp
from operator import add
from statistics import NormalDist, fmean

from grpo_mp.batching.shared_prompts import SamplePrompt
from grpo_mp.batching.updates import PackingRule, packing_rule, plan_update
from grpo_mp.config import Settings, SftSettings
from grpo_mp.distributed.coordinates import data_parallel_size
from grpo_mp.distributed.layout import (
    IndexerShape,
    ModelShape,
    check_layout,
    critic_layout,
    model_shape,
    sets_pipeline_layout,
)
from grpo_mp.distributed.stages import StageLayers, check_index_share, layers_of_stages
from grpo_mp.models.families import family_of
from grpo_mp.models.fp8_products import check_fp8_products
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.lora import check_adapters
from grpo_mp.models.sparse_attention import INDEXER, INDEXER_LOSS
from grpo_mp.models.value_head import critic_config
from grpo_mp.models.weight_formats import WeightFormat
from grpo_mp.planner.clusters import OVERHEADS, Cluster
from grpo_mp.planner.model_configs import find_config
from grpo_mp.planner.parameter_count import (
    ParameterCount,
    adapter_counts,
    critic_parameter_counts,
    local_parameter_counts,
    with_mtp_layer,
)
from grpo_mp.policy.parameter_bytes import BytesPerParameter, bytes_per_parameter
from grpo_mp.rollout.engine_layout import (
    EngineParallelism,
    check_blocks,
    check_dtype,
    check_kernels,
    engine_format,
    engine_parallelism,
    engine_placements,
)


@dataclass(frozen=True)
class PackingEstimate:
    """Number of micro-batches of one data-parallel rank, and their padding.

    `load_factor`: tokens that the busiest rank computes / (all samples' tokens / dp_size). Padding and imbalance raise
    it, shared prompts lower it.
    """

    microbatches: int
    load_factor: float


@lru_cache(maxsize=1024)
def pack_update(
    responses: tuple[int, ...], prompt_tokens: int, samples_per_prompt: int, rule: PackingRule
) -> PackingEstimate:
    """Plan the micro-batches of one update. `samples_per_prompt`: that share one packed prompt; 0: not shared."""
    tokens = [prompt_tokens + response for response in responses]
    prompts = list[SamplePrompt]()
    if samples_per_prompt:  # every prompt gets short and long responses
        num_prompts = -(-len(responses) // samples_per_prompt)
        prompts = [SamplePrompt(sample % num_prompts, prompt_tokens) for sample in range(len(responses))]
    update = plan_update(tokens, rule, prompts)
    loads = [sum(max(plan.tokens, plan.pad_to) for plan in rank) for rank in update.schedule.ranks]
    busiest = update.padded_size * update.schedule.microbatches or max(loads)
    return PackingEstimate(update.schedule.microbatches, busiest * rule.dp_size / sum(tokens))


@lru_cache(maxsize=64)
def response_lengths(samples: int, mean: float, limit: int) -> tuple[int, ...]:
    """Return evenly spaced quantiles of a lognormal distribution, cut off at `limit`, in ascending order.

    The median is chosen by bisection so that the mean of the lengths is `mean`.
    """
    scores = [NormalDist().inv_cdf((number + 0.5) / samples) for number in range(samples)]
    factors = [exp(OVERHEADS.response_log_std * score) for score in scores]

    def responses(median: float) -> list[float]:
        return [min(float(limit), max(1.0, median * factor)) for factor in factors]

    # At the highest median all lengths equal the limit
    low = 0.0
    high = limit / factors[0]
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fmean(responses(middle)) < mean else (low, middle)
    return tuple(round(length) for length in responses(high))


@dataclass(frozen=True)
class PlannedJob:
    """Settings of a job and the machines it is planned for.

    `parameter_counts`: parameters of the policy on one rank of each pipeline stage. `policy_trained_counts`: those with
    gradients and optimizer state (all of them, or the LoRA adapters).
    """

    settings: Settings
    hf: HfConfig
    model: ModelShape
    cluster: Cluster
    nodes: int
    gpus_per_node: int
    stage_layers: StageLayers
    parameter_counts: tuple[ParameterCount, ...]
    policy_trained_counts: tuple[ParameterCount, ...]
    mean_response_tokens: float  # assumed
    per_parameter: BytesPerParameter
    trains_only: bool = False  # supervised fine-tuning: no engine, rewards or reference model

    @cached_property
    def weight_bytes(self) -> tuple[float, ...]:
        return tuple(float(count.total * self.per_parameter.weights) for count in self.parameter_counts)

    @cached_property
    def models(self) -> dict[str, "PlannedJob"]:
        return {"": self} | ({"critic ": self.critic} if self.has_critic else {})

    @property
    def held_weight_bytes(self) -> tuple[float, ...]:
        return tuple(map(sum, zip(*(model.weight_bytes for model in self.models.values()), strict=True)))

    def trained_share(self, stage: int) -> float:
        """Return the parameters per rank of `stage` whose optimizer state the rank keeps, over all models."""
        return sum(model.sharded_parameters(model.policy_trained_counts[stage]) for model in self.models.values())

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def train_ranks(self) -> int:
        """Return the number of training ranks: all ranks but the last `engine.ranks`."""
        return self.world_size - self.settings.engine.ranks

    @property
    def offloads(self) -> bool:
        return self.settings.shares_devices and self.settings.model.offloads

    @property
    def saves_weights_beside(self) -> bool:
        """Return whether weights are saved in the background: nothing swaps or offloads them before the next update."""
        return not (self.has_reference or self.offloads or self.trains_only)

    @property
    def optimizer_offload(self) -> str:
        """Return the effective `optimizer.offload`: "step" means "none" where no phase offloads."""
        offload = self.settings.optimizer.offload
        return "none" if offload == "step" and not self.offloads else offload

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether a layer is an MoE layer. The multi-token-prediction layer is like the last decoder layer."""
        return self.model.is_moe_layer[min(layer, self.model.num_layers - 1)]

    @property
    def dp_size(self) -> int:
        return data_parallel_size(self.settings.layout, self.train_ranks)

    @property
    def dense_shards(self) -> int:
        return self.dp_size * self.settings.layout.context

    @property
    def expert_shards(self) -> int:
        layout = self.settings.layout
        return self.train_ranks // (layout.expert * layout.expert_tensor * layout.pipeline)

    def sharded_parameters(self, count: ParameterCount) -> float:
        """Return the parameters whose optimizer state a rank keeps, if the rank holds `count` parameters."""
        return count.dense / self.dense_shards + count.expert / self.expert_shards

    @property
    def largest_stage(self) -> int:
        return max(range(len(self.parameter_counts)), key=lambda stage: self.parameter_counts[stage].total)

    @property
    def parameters(self) -> int:
        """Return the parameters of the policy. Parameters replicated by tensor parallelism count once per rank."""
        return self._full_count(self.parameter_counts)

    @property
    def trained_parameters(self) -> int:
        return sum(model._full_count(model.policy_trained_counts) for model in self.models.values())

    def _full_count(self, counts: tuple[ParameterCount, ...]) -> int:
        layout = self.settings.layout
        experts = sum(count.expert for count in counts) * layout.expert * layout.expert_tensor
        return sum(count.dense for count in counts) * layout.tensor + experts

    @property
    def has_critic(self) -> bool:
        return self.settings.critic is not None

    @cached_property
    def critic(self) -> "PlannedJob":
        """Return the critic as a job of its own, with its own model, settings and layout."""
        assert self.settings.critic
        own = self.settings.for_critic()
        hf = self.hf
        if self.settings.critic.path:
            hf, _ = find_config(own.model.path, None, "critic.path", "give a folder with its config.json")
            hf = replace(hf, family=own.model.family)
        hf = critic_config(hf)
        model = model_shape(hf)
        megatron = own.training.megatron_args
        own = own.model_copy(update={"layout": critic_layout(own.layout, model)})
        check_layout(own.layout, model, self.train_ranks, sets_pipeline_layout(megatron), setting="critic: layout")
        stage_layers = layers_of_stages(model.num_layers, own.layout, megatron)
        counts = critic_parameter_counts(hf, own.layout, stage_layers)
        return replace(
            self,
            settings=own,
            hf=hf,
            model=model,
            stage_layers=stage_layers,
            parameter_counts=counts,
            policy_trained_counts=counts,
            per_parameter=bytes_per_parameter(own.model.dtype, megatron, own.optimizer.offload),
        )

    @property
    def num_engines(self) -> int:
        engine = self.settings.engine
        return (engine.ranks or self.world_size) // engine.gpus_per_engine

    @cached_property
    def engine_parallelism(self) -> EngineParallelism:
        """Return how an engine divides the model.

        Raise UserError if engine.gpus_per_engine and engine.args contradict each other, the model or blocks of values.
        """
        engine = self.settings.engine
        parallelism = engine_parallelism(engine.gpus_per_engine, engine.args, self.hf)
        check_dtype(self.settings.model.dtype, engine.args, self.hf, self.engine_format)
        if form := self.engine_format:
            check_blocks(parallelism, self.hf, form)
            check_kernels(engine.args, form, None)
        return parallelism

    @property
    def engine_format(self) -> WeightFormat | None:
        """Return the format of the engines' projections; None: that of the policy."""
        return engine_format(self.settings.engine.args, self.hf, cpu=False)

    @property
    def replayed_indexer(self) -> IndexerShape | None:
        """Return the shape of the indexers whose keys training replays; None without replay of keys."""
        return self.model.indexer if self.settings.training.replays_keys else None

    @property
    def stores_keys(self) -> bool:
        """Return whether Megatron stores chosen keys with the micro-batch, for layers that share or replay them."""
        return self.model.shares_keys or self.replayed_indexer is not None

    @property
    def has_reference(self) -> bool:
        return self.settings.algorithm.kl.coef > 0

    @property
    def prompt_tokens(self) -> int:
        """Return the assumed prompt length: half of rollout.max_prompt_tokens."""
        return max(1, self.settings.rollout.max_prompt_tokens // 2)

    @property
    def mean_seq_len(self) -> float:
        """Return the mean length of prompt and response [tokens]."""
        return self.prompt_tokens + self.mean_response_tokens

    @property
    def attention_context(self) -> float:
        """Return the length of a token's sequence, averaged over tokens: sum(length^2) / sum(length)."""
        lengths = [self.prompt_tokens + response for response in self.responses(self.settings.samples_per_step)]
        return sum(length**2 for length in lengths) / sum(lengths)

    @property
    def microbatch_tokens(self) -> int:
        """Return the size of the largest micro-batch [tokens]; one sequence may exceed max_tokens_per_microbatch."""
        training = self.settings.training
        longest = self.settings.rollout.max_sequence_tokens
        update_tokens = self.settings.samples_per_step // training.updates_per_step * longest
        return min(max(training.max_tokens_per_microbatch, longest), update_tokens)

    def responses(self, samples: int) -> tuple[int, ...]:
        """Return assumed lengths of responses [tokens]."""
        return response_lengths(samples, self.mean_response_tokens, self.settings.rollout.max_response_tokens)

    @property
    def packing(self) -> PackingEstimate:
        """Pack an update's micro-batches as the trainer does, with lognormal response lengths of the assumed mean."""
        training = self.settings.training
        rollout = self.settings.rollout
        responses = self.responses(max(1, self.settings.samples_per_step // training.updates_per_step))
        rule = packing_rule(self.settings.layout, training, self.dp_size, self.model.hidden_size)
        return pack_update(responses, self.prompt_tokens, rollout.group_size * training.share_prompts, rule)


def check_megatron_args(job: PlannedJob) -> None:
    """Raise UserError if Megatron, which must be installed and prepared, rejects the settings."""
    from grpo_mp.policy.megatron_config import check_overrides, transformer_config
    from grpo_mp.policy.sparse_attention import supports_sparse_attention

    own = job.settings
    check_overrides(own.training.megatron_args)
    if job.model.indexer and not supports_sparse_attention():
        return  # a cluster may have a newer Megatron than the machine that plans
    transformer_config(own.layout, own.training, own.model.dtype, job.hf)


def make_job(
    settings: Settings | SftSettings,
    hf: HfConfig,
    cluster: Cluster,
    nodes: int,
    gpus_per_node: int | None = None,
    mean_tokens: float | None = None,
) -> PlannedJob:
    """Make the planned job. `mean_tokens`: of a response, or of a sample of supervised fine-tuning; None: half of most.

    Supervised fine-tuning is planned as the trainer of an RL job whose engines have their own GPUs.
    """
    trains_only = isinstance(settings, SftSettings)
    if isinstance(settings, SftSettings):
        mean_tokens = max(1.0, (mean_tokens or max(2, settings.sft.max_tokens) / 2) - 1)
        settings = settings.as_trainer_of_rl()
    gpus_per_node = gpus_per_node or cluster.gpus_per_node
    world_size = nodes * gpus_per_node
    layout = settings.layout
    hf = replace(hf, family=settings.model.family, trains_mtp=settings.model.trains_mtp)
    megatron = settings.training.megatron_args
    model = model_shape(hf)
    engine_placements(settings.engine, world_size, gpus_per_node)
    check_layout(layout, model, world_size - settings.engine.ranks, sets_pipeline_layout(megatron))
    if settings.training.fp8_format:
        check_fp8_products(family_of(hf).rules(hf), layout.tensor, layout.expert_tensor)
    stage_layers = with_mtp_layer(layers_of_stages(model.num_layers, layout, megatron), hf)
    counts = local_parameter_counts(hf, layout, stage_layers)
    lora = settings.model.lora
    trained = counts
    check_index_share(model, layout, megatron)
    if model.indexer and not megatron.get(INDEXER_LOSS):
        unfrozen = [rule for rule in family_of(hf).rules(hf) if INDEXER not in rule.name]
        trained = local_parameter_counts(hf, layout, stage_layers, unfrozen)
    if lora:
        sizes = (layout.tensor, layout.expert, layout.expert_tensor)
        check_adapters(family_of(hf).params(hf), lora.targets, *sizes)
        trained = adapter_counts(hf, layout, stage_layers, lora)
        counts = tuple(map(add, counts, trained))
    job = PlannedJob(
        settings=settings,
        hf=hf,
        model=model,
        cluster=cluster,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        stage_layers=stage_layers,
        parameter_counts=counts,
        policy_trained_counts=trained,
        mean_response_tokens=mean_tokens or settings.rollout.max_response_tokens / 2,
        per_parameter=bytes_per_parameter(
            settings.model.dtype,
            megatron,
            settings.optimizer.offload,
            updated_reference=settings.algorithm.kl.ref_update_every > 0,
        ),
        trains_only=trains_only,
    )
    _ = job.models  # raises an error for a critic that does not fit the layout
    return job
