"""Self-distillation: micro-batches in which the policy scores its own responses after the teacher's prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from grpo_mp.batching.microbatches import MicroBatchPlan, MicroBatchSchedule
from grpo_mp.batching.updates import PackingRule, UpdatePlan, alignment, microbatches, plan_update, sequence_of_token
from grpo_mp.distributed.process_groups import Parallel, sum_over_context
from grpo_mp.utils.types import MicroBatch, Sample, SampleInfo

Updates = Sequence[Sequence[MicroBatch]]


@dataclass(frozen=True)
class TeacherPass:
    """The policy's forward pass as its own teacher, over the taught sequences that this rank trains on in the step."""

    plan: UpdatePlan  # indexes sequences of the step
    microbatches: Sequence[MicroBatch]
    infos: Sequence[SampleInfo]  # of all sequences of the step
    own: Sequence[int]  # sequences that this rank trains on, taught or not

    def with_logprobs(
        self, updates: Updates, plans: Sequence[UpdatePlan], outputs: Sequence[torch.Tensor], parallel: Parallel
    ) -> list[list[MicroBatch]]:
        """Return the updates with the teacher's logprobs, NaN where a sequence has no teacher.

        `outputs`: logprobs of `microbatches`; pipeline stages without outputs leave the updates as they are.
        """
        if not outputs:
            return [list(update) for update in updates]
        responses = torch.tensor([self.infos[i].response_tokens for i in self.own])
        starts = torch.zeros(len(self.infos), dtype=torch.int64)  # of each response in the table of own tokens
        starts[list(self.own)] = responses.cumsum(0) - responses
        prompts = torch.tensor([info.prompt_tokens for info in self.infos])
        shown = torch.tensor([info.teacher_prompt_tokens for info in self.infos])

        def rows(batch: MicroBatch, plan: UpdatePlan, prompt_tokens: torch.Tensor) -> torch.Tensor:
            # The last token of the prompt predicts the first of the response.
            sequence = sequence_of_token(batch, plan)
            return (starts[sequence] + batch.positions - (prompt_tokens[sequence] - 1))[batch.mask.bool()]

        def taught(batch: MicroBatch, plan: UpdatePlan) -> MicroBatch:
            mask = batch.mask.bool()
            found = torch.zeros_like(batch.mask)
            found[mask] = table[rows(batch, plan, prompts)]
            served = batch.teacher_logprobs  # of data sets that another model teaches
            others = found.masked_fill(mask, torch.nan) if served is None else served
            return replace(batch, teacher_logprobs=found.where(shown[sequence_of_token(batch, plan)] > 0, others))

        table = torch.zeros(int(responses.sum()))
        for batch, output in zip(self.microbatches, outputs, strict=True):
            table[rows(batch, self.plan, shown)] = output[0].cpu()[batch.mask.bool()]
        table = sum_over_context(table, parallel)  # a rank has other tokens of a response after the teacher's prompt
        return [[taught(batch, plan) for batch in update] for update, plan in zip(updates, plans, strict=True)]


def make_teacher_pass(
    samples: Mapping[int, Sample],
    infos: Sequence[SampleInfo],
    plans: Sequence[UpdatePlan],
    rule: PackingRule,
    parallel: Parallel,
) -> TeacherPass | None:
    """Plan the teacher's pass, identically on every rank, and pack this rank's part; None: no sequence is taught.

    `samples`: this rank's sequences by index in the step; `plans`: of the updates. Every data-parallel rank scores the
    sequences that it trains on, so that none is sent again.
    """
    if not any(info.teacher_prompt_tokens for info in infos):
        return None
    by_rank = list[list[MicroBatchPlan]]()
    for data in range(rule.dp_size):
        taught = [i for plan in plans for i in plan.samples_of(data) if infos[i].teacher_prompt_tokens]
        lengths = [infos[i].teacher_prompt_tokens + infos[i].response_tokens for i in taught]
        (alone,) = plan_update(lengths, replace(rule, dp_size=1)).schedule.ranks
        by_rank.append([replace(one, samples=tuple(taught[i] for i in one.samples)) for one in alone])
    count = max(map(len, by_rank))  # every rank has the same number of micro-batches
    ranks = tuple((*plans, *[MicroBatchPlan()] * (count - len(plans))) for plans in by_rank)
    schedule = MicroBatchSchedule(ranks, alignment(rule.layout)).padded_to_multiple(rule.pad_multiple)
    plan = UpdatePlan(tuple(range(len(infos))), schedule, rule)
    shown = {i: replace(sample, prompt_tokens=sample.teacher_prompt) for i, sample in samples.items()}
    zeros = [0.0] * len(infos)
    place = parallel.coords
    batches = microbatches(plan, shown, zeros, zeros, data_rank=place.data, context_rank=place.context)
    return TeacherPass(plan, batches, infos, [i for update in plans for i in update.samples_of(place.data)])
