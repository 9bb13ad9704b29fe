"""Packs samples into the tensors of a micro-batch, and gathers per-token values back by sample.

A sequence is prompt, response, padding. The position before a response token predicts it, so a sample with p prompt
and r response tokens has its r response values at positions p-1 .. p+r-2 of its sequence.

"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from grpo_mp.batching.microbatches import MicroBatchPlan, SharedPrompt
from grpo_mp.platform.packed_attention import zigzag_positions
from grpo_mp.utils.types import NO_TOKEN, MicroBatch, PerToken, RowRange, Sample

NO_PROMPT = RowRange()


def pack(
    samples: Sequence[Sample] | Mapping[int, Sample],
    advantages: Sequence[PerToken],
    loss_weights: Sequence[PerToken],
    plan: MicroBatchPlan,
    align: int,
    pad_to: int = 0,
) -> MicroBatch:
    """Pack the plan's samples end to end; padding up to `pad_to` tokens is one last sequence.

    `plan` indexes `samples`, `advantages` (a scalar or [response tokens] each) and `loss_weights` (a scalar or
    [generated tokens] each). A shared prompt precedes its samples as a sequence of its own. A micro-batch without
    samples is one dummy sequence of padding, of `pad_to` or else `align` tokens.

    Raises ValueError for a sample that is longer than planned or has no prompt.
    """
    sequences = _lay_out_sequences(plan, align, pad_to)
    total = sum(sequence.length for sequence in sequences)
    topk = next((topk.k for i in plan.samples if (topk := samples[i].teacher_topk)), None)
    kept = max((int(of_sample.counts.max()) for i in plan.samples if (of_sample := samples[i].kept)), default=0)
    batch = MicroBatch(
        tokens=torch.zeros(total, dtype=torch.int64),
        positions=torch.cat([torch.arange(sequence.length) + sequence.prompt.count for sequence in sequences]),
        targets=torch.zeros(total, dtype=torch.int64),
        mask=torch.zeros(total),
        lengths=tuple(sequence.length for sequence in sequences),
        sequence_index=torch.full((total,), -1),
        sample_ids=plan.samples,
        advantages=torch.zeros(total, dtype=torch.float64),
        loss_weights=torch.zeros(total, dtype=torch.float64),
        rollout_logprobs=torch.zeros(total),
        teacher_logprobs=torch.zeros(total) if any(samples[i].teacher_logprobs for i in plan.samples) else None,
        teacher_topk_ids=None if topk is None else torch.full((total, topk), NO_TOKEN, dtype=torch.int32),
        teacher_topk_logprobs=None if topk is None else torch.zeros(total, topk),
        kept_ids=torch.full((total, kept), NO_TOKEN, dtype=torch.int32) if kept else None,
        prompt_rows=tuple(sequence.prompt for sequence in sequences) if plan.prompts else (),
    )
    for sequence in sequences:
        if sequence.number >= 0:
            index = plan.samples[sequence.number]
            shared = batch.tokens[sequence.prompt.start :][: sequence.prompt.count]
            response = _write_sample(batch, sequence, samples[index], shared)
            following = samples[index].prompt_tokens[1 : sequence.prompt.count + 1]
            batch.targets[sequence.prompt.start :][: len(following)] = torch.tensor(following, dtype=torch.int64)
            batch.advantages[response] = advantages[index]
            batch.advantages[response] *= batch.mask[response]
            batch.loss_weights[response][batch.mask[response].bool()] = loss_weights[index]
    return batch


@dataclass(frozen=True)
class _Sequence:
    """A packed sequence: its rows, index of its sample in the plan (-1: none), and the rows of its shared prompt."""

    start: int
    length: int
    number: int = -1
    prompt: RowRange = NO_PROMPT


def token_origins(plan: MicroBatchPlan, align: int, pad_to: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the origin of each packed token, int64 [T, 2], and the padded lengths of the sequences.

    An origin is (sample index as in `plan.samples`, token index in the sample). The sample is -1 in padding sequences;
    the token index may exceed the sample's length in the padding behind it. A shared prompt belongs to its first
    sample.
    """
    sequences = _lay_out_sequences(plan, align, pad_to)
    origins = torch.full((sum(sequence.length for sequence in sequences), 2), -1)
    for sequence in sequences:
        if sequence.number >= 0:
            rows = sequence.length
            shared = sequence.prompt.count
            sample = plan.samples[sequence.number]
            for start, first, count in ((sequence.start, shared, rows), (sequence.prompt.start, 0, shared)):
                if count and origins[start, 0] < 0:
                    origins[start : start + count, 0] = sample
                    origins[start : start + count, 1] = torch.arange(first, first + count)
    return origins, tuple(sequence.length for sequence in sequences)


def _lay_out_sequences(plan: MicroBatchPlan, align: int, pad_to: int) -> list[_Sequence]:
    """List the plan's sequences: each shared prompt before its samples, padding last."""
    sequences: list[_Sequence] = []
    start = number = 0
    for shared in plan.prompts or (SharedPrompt(len(plan.samples), 0, 0),):
        prompt = RowRange(start, shared.tokens) if shared.tokens else NO_PROMPT
        if shared.length:
            sequences.append(_Sequence(start, shared.length))
            start += shared.length
        for length in plan.lengths[number : number + shared.samples]:
            sequences.append(_Sequence(start, length, number, prompt))
            start += length
            number += 1
    total = max(plan.tokens, plan.pad_to, pad_to) or align
    return [*sequences, _Sequence(start, total - start)] if total > start else sequences


def _write_sample(batch: MicroBatch, sequence: _Sequence, sample: Sample, prompt_rows: torch.Tensor) -> slice:
    """Write one sample into `batch`, and its shared prompt tokens into `prompt_rows`.

    Return the positions that predict its response.
    """
    label = f"sample {sample.group_id}/{sample.index}"
    if not sample.prompt_tokens:
        raise ValueError(f"{label} has no prompt token that could predict its first token")
    shared_tokens = len(prompt_rows)
    if shared_tokens:
        prompt_rows[:] = torch.tensor(sample.prompt_tokens[:shared_tokens])
        sample = replace(sample, prompt_tokens=sample.prompt_tokens[shared_tokens:])
    if sample.total_tokens > sequence.length:
        raise ValueError(f"{label} has {sample.total_tokens} tokens, planned were {sequence.length}")
    start = sequence.start
    end = sequence.start + sample.total_tokens
    response = slice(start + len(sample.prompt_tokens) - 1, end - 1)
    tokens = torch.tensor(sample.prompt_tokens + sample.tokens)
    batch.tokens[start:end] = tokens
    batch.targets[start : end - 1] = tokens[1:]
    batch.sequence_index[start:end] = sequence.number
    batch.mask[response] = torch.tensor(sample.generated, dtype=torch.float32) if sample.generated else 1.0
    batch.rollout_logprobs[response] = torch.tensor(sample.rollout_logprobs)
    if batch.teacher_logprobs is not None:
        batch.teacher_logprobs[response] = torch.tensor(sample.teacher_logprobs or torch.nan)
    if batch.teacher_topk_ids is not None and batch.teacher_topk_logprobs is not None and sample.teacher_topk:
        batch.teacher_topk_ids[response] = torch.tensor(sample.teacher_topk.ids)
        batch.teacher_topk_logprobs[response] = torch.tensor(sample.teacher_topk.logprobs)
    if batch.kept_ids is not None and sample.kept:
        batch.kept_ids[response] = torch.from_numpy(sample.kept.padded(batch.kept_ids.shape[1]))
    return response


def with_mtp_targets(batch: MicroBatch) -> MicroBatch:
    """Set targets and loss weights of the multi-token-prediction layer in a full micro-batch.

    At each position the target is the token after the main target, with that token's loss weight, if both tokens were
    generated.
    """
    both = batch.mask * batch.mask.roll(-1)  # 0 at a sequence's last position: nothing crosses into the next
    return replace(
        batch,
        mtp_targets=batch.targets.roll(-1),
        mtp_weights=batch.loss_weights.roll(-1) * both,
        mtp_rollout_logprobs=batch.rollout_logprobs.roll(-1),
    )


def gather_responses(values: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, ...]:
    """Split per-token values [T] of a full micro-batch into one tensor [generated tokens] per `sample_ids` entry."""
    counts = torch.bincount(batch.sequence_index[batch.mask.bool()], minlength=len(batch.sample_ids))
    return values[batch.mask.bool()].split(counts.tolist()) if batch.sample_ids else ()


def slice_context(batch: MicroBatch, context: int, rank: int) -> MicroBatch:
    """Return the slice of a micro-batch for context-parallel rank `rank` of `context`.

    Each sequence is cut into 2 * context chunks. The rank gets chunk `rank` and its mirror image, which balances causal
    attention. `lengths` keep the lengths of the full sequences.

    Raises ValueError if a length is not a multiple of 2 * context.
    """
    if context == 1:
        return batch
    index = context_index(batch.lengths, context, rank).to(batch.tokens.device)
    per_token: dict[str, Any] = {
        name: value[index] for name, value in vars(batch).items() if isinstance(value, torch.Tensor)
    }
    return replace(batch, **per_token)


def context_index(lengths: Sequence[int], context: int, rank: int) -> torch.Tensor:
    """Return the positions that a context-parallel rank holds, in its order, int64 [T / context]."""
    if context == 1:
        return torch.arange(sum(lengths))
    if any(length % (2 * context) for length in lengths):
        raise ValueError(f"lengths {tuple(lengths)} are not multiples of 2 x context = {2 * context}")
    starts = accumulate(lengths, initial=0)
    return torch.cat([zigzag_positions(n, context, rank) + start for n, start in zip(lengths, starts, strict=False)])
