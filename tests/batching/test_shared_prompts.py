"""Prompts that are packed once: every sample with its own numbers, and no micro-batch too large."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mp.batching.packing import gather_responses
from grpo_mp.batching.shared_prompts import SamplePrompt, make_units
from grpo_mp.batching.updates import PackingRule, microbatches, plan_updates
from grpo_mp.config.sections import LayoutConfig
from grpo_mp.utils.types import MicroBatch, Sample

HIDDEN = 64


def make_samples(prompts: list[int], responses: list[list[int]]) -> list[Sample]:
    """Make samples: only those of one prompt share tokens."""
    samples = []
    for group, (prompt, lengths) in enumerate(zip(prompts, responses, strict=True)):
        tokens = tuple(range(10_000 * group, 10_000 * group + prompt))
        for index, length in enumerate(lengths):
            first = 10_000 * group + 1000 * (index + 1)
            logprobs = tuple(float(token) for token in range(first, first + length))
            response = tuple(range(first, first + length))
            samples.append(Sample(group, index, tokens, response, logprobs, (0,) * length, truncated=False))
    return samples


def pack_all(samples: list[Sample], layout: LayoutConfig, dp_size: int, max_tokens: int) -> list[MicroBatch]:
    """Pack the micro-batches of all data-parallel ranks. A sample's advantage and weight are its number."""
    lengths = [sample.total_tokens for sample in samples]
    prompts = [SamplePrompt(sample.group_id, len(sample.prompt_tokens)) for sample in samples]
    (update,) = plan_updates(lengths, 1, PackingRule(layout, dp_size, max_tokens, HIDDEN), prompts=prompts)
    numbers = [float(i) for i in range(len(samples))]
    samples_by_index = dict(enumerate(samples))
    ranks = [microbatches(update, samples_by_index, numbers, numbers, rank, 0) for rank in range(dp_size)]
    assert len({len(rank) for rank in ranks}) == 1
    return [batch for rank in ranks for batch in rank]


def attended_tokens(batch: MicroBatch, sequence: int) -> list[int]:
    """Return the tokens that a sequence attends to, in order: its prompt, then its own."""
    start = sum(batch.lengths[:sequence])
    prompt = batch.prompt_rows[sequence]
    own_tokens = batch.tokens[start : start + batch.lengths[sequence]]
    return [*batch.tokens[prompt.start : prompt.start + prompt.count].tolist(), *own_tokens.tolist()]


groups = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 40), min_size=1, max_size=6)), min_size=1, max_size=6
)


@given(groups, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(1, 3), st.integers(20, 300))
@settings(max_examples=200, deadline=None)
def test_every_sample_is_packed_once_after_its_prompt(
    drawn: list[tuple[int, list[int]]], tensor: int, pipeline: int, dp_size: int, max_tokens: int
) -> None:
    samples = make_samples([prompt for prompt, _ in drawn], [lengths for _, lengths in drawn])
    layout = LayoutConfig(tensor=tensor, pipeline=pipeline)
    packed: list[int] = []
    for batch in pack_all(samples, layout, dp_size, max_tokens):
        assert batch.total_tokens == sum(batch.lengths)
        assert batch.total_tokens % tensor == 0
        longest = max(sample.total_tokens + tensor for sample in samples)
        assert batch.total_tokens <= max(max_tokens, longest)
        per_sample = zip(
            batch.sample_ids, *(gather_responses(getattr(batch, name), batch) for name in FIELDS), strict=True
        )
        for i, targets, advantages, weights, logprobs in per_sample:
            sample = samples[i]
            packed.append(i)
            assert targets.tolist() == list(sample.tokens)
            assert logprobs.tolist() == list(sample.rollout_logprobs)
            assert set(advantages.tolist()) == set(weights.tolist()) == {float(i)}
        starts = [sum(batch.lengths[:number]) for number in range(len(batch.lengths))]
        for number, start in enumerate(starts):
            sample_slot = int(batch.sequence_index[start])
            if sample_slot < 0:
                continue
            sample = samples[batch.sample_ids[sample_slot]]
            prompt = batch.prompt_rows[number]  # a layer that predicts ahead is given the next tokens of its rows
            following = batch.targets[prompt.start : prompt.start + prompt.count]
            assert following.tolist() == list(sample.prompt_tokens[1 : prompt.count + 1])
            full_tokens = [*sample.prompt_tokens, *sample.tokens]
            prompt = batch.prompt_rows[number].count
            assert attended_tokens(batch, number)[: len(full_tokens)] == full_tokens
            assert prompt in (0, len(sample.prompt_tokens) - 1)
            own_positions = slice(start, start + len(full_tokens) - prompt)
            assert batch.positions[own_positions].tolist() == list(range(prompt, len(full_tokens)))
    assert sorted(packed) == list(range(len(samples)))


FIELDS = ("targets", "advantages", "loss_weights", "rollout_logprobs")


@pytest.mark.parametrize("dp_size", [2, 4])
def test_few_groups_still_divide_over_ranks(dp_size: int) -> None:
    lengths = [110] * 16
    units = make_units(lengths, [SamplePrompt(0, 10)] * 16, dp_size, 4096, 1)
    assert len(units) >= 2 * dp_size
    assert sum(len(unit.samples) for unit in units) == 16
    assert max(len(unit.samples) for unit in units) <= 16 / (2 * dp_size)
