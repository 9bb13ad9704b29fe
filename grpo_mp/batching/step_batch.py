"""Turns a step's groups into this rank's micro-batches, and adds logprobs, values and KL to them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from grpo_mp.algorithms.advantages import (
    AdvantageEstimator,
    distillation_advantages,
    estimate_advantages,
    outcome_advantages,
)
from grpo_mp.algorithms.distillation_settings import DistillationConfig
from grpo_mp.algorithms.losses import estimate_kl, token_weights
from grpo_mp.algorithms.registries import policy_loss_entry
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.batching.exchange import redistribute
from grpo_mp.batching.packing import context_index
from grpo_mp.batching.routed_experts import exchange_routed_experts
from grpo_mp.batching.self_teacher import TeacherPass, make_teacher_pass
from grpo_mp.batching.shared_prompts import SamplePrompt
from grpo_mp.batching.updates import (
    StepRule,
    UpdatePlan,
    microbatches,
    plan_updates,
    sample_order,
    sequence_of_token,
)
from grpo_mp.config.sections import RolloutConfig
from grpo_mp.distributed.coordinates import model_parallel_ranks
from grpo_mp.distributed.process_groups import Job, Parallel, sum_over_context
from grpo_mp.utils.types import MicroBatch, PerToken, Sample, SampleGroup, SampleInfo

UpdateBatches = list[list[MicroBatch]]


@dataclass(frozen=True)
class StepBatch:
    """Statistics of all sequences of the step (SampleInfo), and this rank's micro-batches of each update.

    A sample is one sequence, except for an episode that forked into several. The episode's advantage applies to all
    tokens of its sequences, and the loss weights these tokens as one response.
    """

    infos: tuple[SampleInfo, ...]
    in_loss: tuple[bool, ...]
    advantages: tuple[PerToken, ...]  # by sequence, before the KL of kl.apply_to=reward and before whitening
    plan: tuple[UpdatePlan, ...]  # indexes sequences
    updates: tuple[tuple[MicroBatch, ...], ...]
    unrouted_samples: int | None = None  # sequences without experts for routing replay R3; None: R3 is off
    sample_of: tuple[int, ...] = ()  # by sequence: index of its sample in the step
    teacher: TeacherPass | None = None  # of self-distillation; None: no sequence is taught


@dataclass(frozen=True)
class Assembly:
    """Arguments of `assemble_step_batch` that are constant over a run."""

    rule: StepRule
    algorithm: AlgorithmConfig
    rollout: RolloutConfig
    parallel: Parallel
    estimator: AdvantageEstimator
    reward_weights: Mapping[str, float]
    moe_layers: Sequence[int] = ()  # MoE layers on this rank, for routing replay R3
    key_layers: Sequence[int] = ()  # layers on this rank with an indexer whose keys are replayed


def assemble_step_batch(
    groups: list[SampleGroup], infos: Sequence[SampleInfo], step: int, assembly: Assembly
) -> StepBatch:
    """Plan the updates, identically on every rank, and send each sample to the rank that trains on it.

    `groups`: from this rank's engine; with routing replay R3 their experts are removed. `infos`: of the full step,
    equal on every rank. `step`: seeds the shuffle.
    """
    rule = assembly.rule
    algorithm = assembly.algorithm
    rollout = assembly.rollout
    parallel = assembly.parallel
    by_sample = estimate_advantages(assembly.estimator, infos, algorithm.advantage, weights=assembly.reward_weights)
    advantages = _by_sequence(by_sample, [[part.response_tokens for part in info.sequences] for info in infos])
    sequences = _sequences(infos)
    learns = [not is_masked(info, algorithm, rollout.failed == "mask") for info in infos]
    sample_of = tuple(i for i, info in enumerate(infos) for _ in info.sequences)
    plan = _plan(infos, rule, step)
    samples = _exchange(groups, sequences, plan, assembly)

    def pack_update(update: UpdatePlan) -> tuple[MicroBatch, ...]:
        numbers = list(dict.fromkeys(sample_of[i] for i in update.samples))  # sequences of a sample are adjacent
        tokens = [[part.generated_tokens for part in infos[number].sequences] for number in numbers]
        totals = [sum(of_sample) for of_sample in tokens]
        included = [learns[number] for number in numbers]
        weights = token_weights(totals, included, algorithm, rollout.max_response_tokens)
        loss_tokens = sum(total for total, is_included in zip(totals, included, strict=True) if is_included)
        place = parallel.coords
        loss_weights = _by_sequence(weights, tokens)
        batches = microbatches(
            update, samples, advantages, loss_weights=loss_weights, data_rank=place.data, context_rank=place.context
        )
        batches = [replace(batch, entropy_weight=1.0 / max(1, loss_tokens)) for batch in batches]
        if policy_loss_entry(algorithm.policy_loss).needs_correctness:
            right = [info.is_correct is True for info in infos]
            parts = zip(numbers, weights, totals, strict=True)
            total = sum(float(torch.as_tensor(weight).expand(n).sum()) for i, weight, n in parts if right[i])
            of_sequences = torch.tensor([right[i] / (total or 1.0) for i in sample_of], dtype=torch.float64)
            batches = [replace(mb, positive=of_sequences[sequence_of_token(mb, update)] * mb.mask) for mb in batches]
        return tuple(batches)

    updates = tuple(map(pack_update, plan))
    unrouted_samples = None
    if rule.training.replays_engine:
        unrouted_samples = sum(not info.has_routed_experts for info in sequences)
        updates = _with_choices(updates, groups, sequences, plan, assembly)
    return StepBatch(
        sequences,
        in_loss=tuple(learns[i] for i in sample_of),
        advantages=tuple(advantages),
        plan=plan,
        updates=updates,
        unrouted_samples=unrouted_samples,
        sample_of=sample_of,
        teacher=make_teacher_pass(samples, sequences, plan, rule.packing, parallel),
    )


def _with_choices(
    updates: Sequence[tuple[MicroBatch, ...]],
    groups: list[SampleGroup],
    sequences: Sequence[SampleInfo],
    plan: Sequence[UpdatePlan],
    assembly: Assembly,
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Add the choices of engines to the micro-batches."""
    job = assembly.parallel.job
    choices = exchange_routed_experts(groups, sequences, plan, assembly.moe_layers, job, assembly.key_layers)
    return tuple(
        tuple(replace(batch, routed_experts=of) for batch, of in zip(*pair, strict=True))
        for pair in zip(updates, choices, strict=True)
    )


def _sequences(infos: Sequence[SampleInfo]) -> tuple[SampleInfo, ...]:
    return tuple(sequence for info in infos for sequence in info.sequences)


def _exchange(
    groups: list[SampleGroup], sequences: Sequence[SampleInfo], plan: Sequence[UpdatePlan], assembly: Assembly
) -> dict[int, Sample]:
    """Send each sequence to the replica that trains on it; return this rank's sequences by their index in the step."""
    parallel = assembly.parallel
    keys_by_rank = {
        model_parallel_ranks(data, parallel.layout, parallel.world_size)[0]: [
            sequences[i].key for update in plan for i in update.samples_of(data)
        ]
        for data in range(parallel.dp_size)
    }
    samples = redistribute(
        groups,
        keys_by_rank,
        process_group=parallel.cpu_group,
        replica=parallel.replica,
        replica_source=parallel.replica_source,
    )
    index_of = {info.key: i for i, info in enumerate(sequences)}
    return {index_of[key]: _with_topk(sample, assembly.algorithm) for key, sample in samples.items()}


def is_masked(info: SampleInfo, algorithm: AlgorithmConfig, masks_failed: bool) -> bool:
    """Return whether a sample is left out of the loss: truncated, failed, or without a usable reward.

    If groups are compared without whitening, a sample without a reward has the advantage 0 and stays in the loss, as in
    TRL. Otherwise it is masked: without a baseline no advantage is neutral, and whitening would shift 0.
    """
    advantage = algorithm.advantage
    failed = masks_failed and info.state in ("error", "timeout")
    truncated = algorithm.filter.truncated == "mask" and info.truncated
    has_advantage = (advantage.compares_groups and not advantage.whiten) or not algorithm.learns_from_rewards
    return failed or truncated or not (info.is_scored or has_advantage)


def send_routed_experts(
    groups: list[SampleGroup], infos: Sequence[SampleInfo], rule: StepRule, step: int, job: Job
) -> None:
    """Send the routed experts of `groups` to training ranks, from a rank that only hosts an engine.

    Training ranks receive them in `assemble_step_batch`.
    """
    exchange_routed_experts(groups, _sequences(infos), _plan(infos, rule, step), layers=(), job=job)


def _plan(infos: Sequence[SampleInfo], rule: StepRule, step: int) -> tuple[UpdatePlan, ...]:
    """Plan the updates of a step. Samples are shuffled and split among updates; a sample's sequences stay together."""
    sequences = _sequences(infos)
    order = sample_order(len(infos), rule, step)
    starts = [0, *accumulate(len(info.sequences) for info in infos)]
    prompts = [
        SamplePrompt(part.key if part.has_own_prompt else part.group_id, part.prompt_tokens) for part in sequences
    ]
    return plan_updates(
        [sequence.total_tokens for sequence in sequences],
        rule.training.updates_per_step,
        rule.packing,
        order=[i for number in order for i in range(starts[number], starts[number + 1])],
        prompts=prompts if rule.training.share_prompts else (),
        together=[len(infos[number].sequences) for number in order],
    )


def _with_topk(sample: Sample, algorithm: AlgorithmConfig) -> Sample:
    topk = algorithm.distillation.topk if algorithm.distillation else None
    return replace(sample, teacher_topk=sample.teacher_topk.first(topk) if sample.teacher_topk and topk else None)


def _by_sequence(values: Sequence[PerToken], tokens: Sequence[Sequence[int]]) -> list[PerToken]:
    """Expand values per sample to values per sequence.

    A scalar is repeated; a tensor with one value per token is split. `tokens`: for each sample, tokens of each
    sequence.
    """
    parts = list[PerToken]()
    for value, counts in zip(values, tokens, strict=True):
        if len(counts) > 1 and (of_tokens := torch.as_tensor(value)).ndim:
            parts += of_tokens.split(list(counts))
        else:
            parts += [value] * len(counts)
    return parts


def with_logprobs(update: Sequence[MicroBatch], outputs: Sequence[torch.Tensor], field: str) -> list[MicroBatch]:
    """Set `field` of the micro-batches to the logprobs in `outputs`.

    Pipeline stages without `outputs` leave the micro-batches as they are.
    """
    if not outputs:
        return list(update)
    values: list[dict[str, Any]] = [{field: output[0].cpu()} for output in outputs]
    return [replace(batch, **value) for batch, value in zip(update, values, strict=True)]


def with_kl_in_reward(
    updates: UpdateBatches, batch: StepBatch, algorithm: AlgorithmConfig, kl_coef: float, parallel: Parallel
) -> UpdateBatches:
    """Recompute the advantages from rewards minus the KL to the reference.

    With a group baseline the total KL of a response is subtracted from its reward. Without one each token bears the KL
    of itself and of all later tokens (REINFORCE++, arXiv 2501.03262, eq. 7).
    """

    cost = partial(kl_costs, algorithm=algorithm, kl_coef=kl_coef)
    if algorithm.advantage.baseline == "none":
        return [
            [
                _with_advantages(mb, mb.advantages - over_sequences(cost(mb), mb, parallel, _sums_to_end))
                for mb in update
            ]
            for update in updates
        ]
    plans = list(zip(updates, batch.plan, strict=True))
    kl_by_sequence = torch.zeros(len(batch.infos), dtype=torch.float64)
    if parallel.is_reporting_rank:
        for update, plan in plans:
            for mb in update:
                kl_by_sequence.index_add_(0, sequence_of_token(mb, plan), cost(mb))
    dist.all_reduce(kl_by_sequence, group=parallel.cpu_group)
    samples = [info for info in batch.infos if not info.part]
    sample_of = torch.tensor(batch.sample_of)
    kl_by_sample = torch.zeros(len(samples), dtype=torch.float64).index_add(0, sample_of, kl_by_sequence)
    scored = [i for i, info in enumerate(samples) if info.is_scored]
    rewards = [samples[i].reward - float(kl_by_sample[i]) for i in scored]
    of_scored = outcome_advantages(rewards, [samples[i].group_id for i in scored], algorithm.advantage)
    of_samples = torch.zeros(len(samples), dtype=torch.float64)
    of_samples[scored] = torch.tensor(of_scored, dtype=torch.float64)
    advantages = of_samples[sample_of]
    return [[_with_advantages(mb, advantages[sequence_of_token(mb, plan)]) for mb in update] for update, plan in plans]


def kl_costs(batch: MicroBatch, algorithm: AlgorithmConfig, kl_coef: float) -> torch.Tensor:
    """Return the weighted KL [T] in float64; 0 at prompts, padding and tokens with a missing logprob."""
    old = batch.rollout_logprobs if algorithm.old_logprobs == "engine" else batch.old_logprobs
    if batch.reference_logprobs is None or old is None:
        return torch.zeros_like(batch.advantages)
    log_r = (batch.reference_logprobs - old).double()
    known = batch.mask.bool() & log_r.isfinite()
    return kl_coef * estimate_kl(algorithm.kl, log_r, torch.ones_like(log_r)).where(known, 0.0)


def with_distillation(updates: UpdateBatches, distillation: DistillationConfig) -> UpdateBatches:
    """Add the distillation term to the advantages, or replace them by it; with `topk` the term is in the loss instead.

    The policy's logprobs are the trainer's old logprobs if the step computes them, else the engine's.
    """

    def distill(mb: MicroBatch) -> MicroBatch:
        kept = torch.zeros_like(mb.advantages) if distillation.replaces_rewards else mb.advantages
        if mb.teacher_logprobs is None or distillation.topk is not None:  # None: only padding
            return replace(mb, advantages=kept)
        policy = student_logprobs(mb)
        part = distillation_advantages(policy, mb.teacher_logprobs, distillation)
        # Tokens without the policy's logprobs are masked, and those without the teacher's are not taught.
        return _with_advantages(mb, kept + part.where(part.isfinite(), 0.0))

    return [[distill(mb) for mb in update] for update in updates]


def student_logprobs(batch: MicroBatch) -> torch.Tensor:
    """Return the old policy's logprobs [T], to compare with the teacher's: the trainer's, else the engine's."""
    return batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs


def _with_advantages(batch: MicroBatch, advantages: torch.Tensor) -> MicroBatch:
    return replace(batch, advantages=advantages * batch.mask)


def over_sequences(
    values: torch.Tensor, batch: MicroBatch, parallel: Parallel, function: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Apply `function`, [n] -> [n], to the values of each sequence over all context-parallel ranks.

    Values and result: of this rank's tokens, [T].
    """
    index = context_index(batch.lengths, parallel.layout.context, parallel.coords.context)
    packed = torch.zeros(sum(batch.lengths), dtype=values.dtype).index_copy(0, index, values)
    packed = sum_over_context(packed, parallel)
    return torch.cat([function(sequence) for sequence in packed.split(list(batch.lengths))])[index]


def _sums_to_end(values: torch.Tensor) -> torch.Tensor:
    return values.flip(0).cumsum(0).flip(0)


def whiten(updates: UpdateBatches, parallel: Parallel) -> UpdateBatches:
    """Set advantages to (A - mean) / (std + 1e-8) over all tokens of the step in the loss (REINFORCE++, eq. 8)."""
    sums = torch.zeros(3, dtype=torch.float64)
    if parallel.is_reporting_rank:
        for batch in (batch for update in updates for batch in update):
            mask = batch.in_loss.double()
            values = batch.advantages
            sums += torch.stack([mask.sum(), (values * mask).sum(), (values.square() * mask).sum()])
    dist.all_reduce(sums, group=parallel.cpu_group)
    count = sums[0].clamp(min=1)
    mean = sums[1] / sums[0].clamp(min=1)
    std = ((sums[2] / count - mean.square()).clamp(min=0) * count / (count - 1).clamp(min=1)).sqrt()
    return [[_with_advantages(mb, (mb.advantages - mean) / (std + 1e-8)) for mb in update] for update in updates]
