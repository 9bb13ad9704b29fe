"""Logprobs of given token sequences from the policy, in any layout, known to every rank."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from grpo_mp.batching.microbatches import MicroBatchPlan
from grpo_mp.batching.packing import context_index, gather_responses, pack, slice_context
from grpo_mp.batching.updates import alignment
from grpo_mp.policy.policy import Policy
from grpo_mp.types import Sample

Sequences = Sequence[tuple[int, ...]]


def sequence_logprobs(policy: Policy, sequences: Sequences) -> list[list[float]]:
    """Logprob at temperature 1 of every token after the first of each sequence. Every rank must call this."""
    parallel, layout = policy.parallel, policy.parallel.layout
    align = alignment(layout)
    samples = {i: _as_sample(i, tokens) for i, tokens in enumerate(sequences)}
    lengths = tuple(-(-len(tokens) // align) * align for tokens in sequences)
    nothing = [0.0] * len(sequences)
    whole = pack(samples, nothing, nothing, MicroBatchPlan(tuple(samples), lengths), align)
    mine = slice_context(whole, layout.context, parallel.coords.context)
    repeat = layout.pipeline if layout.virtual_pipeline else 1  # an interleaved schedule needs that many
    with policy.at_temperature(1.0):
        outputs = policy.logprobs([mine] * repeat)
    values = torch.zeros(whole.total_tokens)
    if outputs and parallel.coords.tensor == parallel.coords.data == 0:
        values[context_index(whole.lengths, layout.context, parallel.coords.context)] = outputs[0][0].cpu()
    dist.all_reduce(values, group=parallel.cpu_group)
    return [response.tolist() for response in gather_responses(values, whole)]


def _as_sample(number: int, tokens: tuple[int, ...]) -> Sample:
    response = tokens[1:]
    return Sample(number, 0, tokens[:1], response, (0.0,) * len(response), (0,) * len(response), truncated=False)
