"""Divides the samples of a step into optimizer updates, and each update into micro-batches per rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from grpo_mp.batching.microbatches import MicroBatchSchedule, compute_cost, plan_microbatches, round_up
from grpo_mp.batching.packing import pack, slice_context, with_mtp_targets
from grpo_mp.batching.shared_prompts import SamplePrompt, make_units, unpack_units
from grpo_mp.config.sections import LayoutConfig, TrainingConfig
from grpo_mp.utils.types import MicroBatch, PerToken, Sample


@dataclass(frozen=True)
class PackingRule:
    """Parameters by which sequences are packed into the micro-batches of each rank."""

    layout: LayoutConfig
    dp_size: int
    max_tokens: int  # largest micro-batch; a longer sequence gets its own
    hidden_size: int  # of the model; balances attention cost against cost per token
    pad_multiple: int = 1  # the size of a micro-batch is a multiple of this number [tokens]
    with_mtp: bool = False  # a multi-token-prediction layer is trained


@dataclass(frozen=True)
class StepRule:
    """Rules by which the samples of every step are divided into updates and micro-batches."""

    packing: PackingRule
    training: TrainingConfig
    seed: int


@dataclass(frozen=True)
class UpdatePlan:
    """Plan of one optimizer update. Indices in `schedule` refer to `samples`."""

    samples: tuple[int, ...]  # indices into the samples of the step
    schedule: MicroBatchSchedule
    rule: PackingRule

    @property
    def padded_size(self) -> int:
        """Return the size [tokens] that every micro-batch is padded to with pipeline parallelism; 0 without.

        Pipeline stages exchange tensors of a fixed shape.
        """
        if self.rule.layout.pipeline == 1:
            return 0
        plans = (plan for rank in self.schedule.ranks for plan in rank)
        return max(self.schedule.align, max(max(plan.tokens, plan.pad_to) for plan in plans))

    def samples_of(self, data_rank: int) -> tuple[int, ...]:
        return tuple(self.samples[i] for plan in self.schedule.ranks[data_rank] for i in plan.samples)


def plan_updates(
    lengths: Sequence[int],
    updates: int,
    rule: PackingRule,
    order: Sequence[int] | None = None,
    prompts: Sequence[SamplePrompt] = (),
    together: Sequence[int] = (),
) -> tuple[UpdatePlan, ...]:
    """Divide the step's samples into `updates` parts of nearly equal size, and plan each part.

    `lengths`: tokens of prompt and response. `order`: permutation of the samples; None: unchanged. `prompts`: prompt of
    every sample, to pack shared prompts once; (): prompts are not shared. `together`: numbers of consecutive samples,
    in this order, that belong to one episode and stay in one part; (): each sample is an episode.
    """
    order = range(len(lengths)) if order is None else order
    starts = [0, *accumulate(together or [1] * len(lengths))]
    bounds = [starts[(len(starts) - 1) * part // updates] for part in range(updates + 1)]
    parts = [tuple(order[start:end]) for start, end in pairwise(bounds) if end > start]
    return tuple(
        plan_update([lengths[i] for i in part], rule, [prompts[i] for i in part] if prompts else (), part)
        for part in parts
    )


def sample_order(samples: int, rule: StepRule, step: int) -> tuple[int, ...]:
    """Return the order of a step's samples: unchanged, or a permutation seeded by the run's seed and `step`."""
    if not rule.training.shuffle:
        return tuple(range(samples))
    return tuple(np.random.default_rng([rule.seed % 2**64, step]).permutation(samples).tolist())


def plan_update(
    lengths: Sequence[int], rule: PackingRule, prompts: Sequence[SamplePrompt] = (), samples: Sequence[int] = ()
) -> UpdatePlan:
    """Plan the micro-batches of one update. `samples`: indices of its samples in the step.

    With pipeline parallelism all micro-batches are padded to one size, at least that of the longest sequence. This size
    is then also the token limit: fuller micro-batches need no more memory and less padding.
    """
    layout = rule.layout
    align = alignment(rule.layout)
    longest = round_up(max(lengths, default=0), align)
    limit = max(rule.max_tokens, longest) if layout.pipeline > 1 else rule.max_tokens
    units = make_units(lengths, prompts, rule.dp_size, max_tokens=limit, align=align) if prompts else []
    schedule = plan_microbatches(
        [unit.tokens for unit in units] if prompts else lengths,
        rule.dp_size,
        max_tokens=limit,
        align=align,
        multiple=layout.microbatch_multiple,
        costs=[unit.cost(rule.hidden_size) for unit in units]
        if prompts
        else [compute_cost(length, rule.hidden_size) for length in lengths],
    )
    schedule = unpack_units(schedule, units) if prompts else schedule
    return UpdatePlan(tuple(samples), schedule.padded_to_multiple(rule.pad_multiple), rule)


def sequence_of_token(batch: MicroBatch, plan: UpdatePlan) -> torch.Tensor:
    """Return the index in the step of each token's sequence [T]; arbitrary at padding."""
    return torch.tensor([plan.samples[i] for i in batch.sample_ids] or [0])[batch.sequence_index.clamp(min=0)]


def alignment(layout: LayoutConfig) -> int:
    """Return the number of tokens that divides every padded length: 2 * context for zigzag slices, times tensor."""
    return layout.tensor * (2 * layout.context if layout.context > 1 else 1)


def packing_rule(
    layout: LayoutConfig, training: TrainingConfig, dp_size: int, hidden_size: int, with_mtp: bool = False
) -> PackingRule:
    """Return the packing rule of a run, from its settings."""
    multiple = training.padding_multiple(layout)
    return PackingRule(layout, dp_size, training.max_tokens_per_microbatch, hidden_size, multiple, with_mtp)


def microbatches(
    update: UpdatePlan,
    samples: Mapping[int, Sample],
    advantages: Sequence[PerToken],
    loss_weights: Sequence[PerToken],
    data_rank: int,
    context_rank: int,
) -> list[MicroBatch]:
    """Pack the micro-batches of one rank in an update.

    `samples`: by index in the step. `advantages`: of all samples of the step. `loss_weights`: of the update's samples.
    """
    plans = update.schedule.ranks[data_rank]
    local_samples = {i: samples[update.samples[i]] for plan in plans for i in plan.samples}
    pad_to = update.padded_size
    update_advantages = [advantages[i] for i in update.samples]
    batches = [
        pack(local_samples, update_advantages, loss_weights, plan, update.schedule.align, pad_to) for plan in plans
    ]
    batches = [with_mtp_targets(batch) for batch in batches] if update.rule.with_mtp else batches
    return [slice_context(batch, update.rule.layout.context, context_rank) for batch in batches]
