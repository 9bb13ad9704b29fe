import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mp.batching.microbatches import MicroBatchPlan, plan_microbatches
from grpo_mp.batching.packing import gather_responses, pack, slice_context
from grpo_mp.utils.types import Sample
from tests.batching.helpers import join_context


def make_sample(prompt: int, response: int, first: int = 10) -> Sample:
    """Make a sample with distinct tokens from `first` on, and a distinct logprob for every response token."""
    return Sample(
        group_id=0,
        index=first,
        prompt_tokens=tuple(range(first, first + prompt)),
        tokens=tuple(range(first + prompt, first + prompt + response)),
        rollout_logprobs=tuple(-(first + i) / 7 for i in range(response)),
        weight_versions=(0,) * response,
        truncated=False,
    )


SHAPES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=6)


def test_one_micro_batch_by_hand() -> None:
    batch = pack(
        [make_sample(2, 3, 10), make_sample(1, 1, 50)],
        [0.5, -2.0],
        [0.25, 0.75],
        MicroBatchPlan((1, 0), (4, 8)),
        align=4,
    )
    p = -1
    assert batch.tokens.tolist() == [50, 51, 0, 0, 10, 11, 12, 13, 14, 0, 0, 0]
    assert batch.targets.tolist() == [51, 0, 0, 0, 11, 12, 13, 14, 0, 0, 0, 0]
    assert batch.mask.tolist() == [1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
    assert batch.sequence_index.tolist() == [0, 0, p, p, 1, 1, 1, 1, 1, p, p, p]
    assert batch.sample_ids == (1, 0)
    assert batch.lengths == (4, 8)
    assert batch.advantages.tolist() == [-2, 0, 0, 0, 0, 0.5, 0.5, 0.5, 0, 0, 0, 0]
    assert batch.loss_weights.tolist() == [0.75, 0, 0, 0, 0, 0.25, 0.25, 0.25, 0, 0, 0, 0]
    expected = [-50 / 7, 0, 0, 0, 0, -10 / 7, -11 / 7, -12 / 7, 0, 0, 0, 0]
    assert torch.equal(batch.rollout_logprobs, torch.tensor(expected))


@given(SHAPES, st.sampled_from([1, 2, 4]), st.integers(4, 40), st.integers(1, 3))
def test_gathered_values_belong_to_their_samples(
    shapes: list[tuple[int, int]], align: int, max_tokens: int, ranks: int
) -> None:
    samples = [make_sample(p, r, 100 * i) for i, (p, r) in enumerate(shapes)]
    schedule = plan_microbatches([s.total_tokens for s in samples], ranks, max_tokens, align)
    seen = {}
    for plan in (plan for rank in schedule.ranks for plan in rank):
        batch = pack(samples, [1.0] * len(samples), [0.5] * len(samples), plan, align)
        assert batch.total_tokens == sum(batch.lengths)
        targets = gather_responses(batch.targets, batch)
        logprobs = gather_responses(batch.rollout_logprobs, batch)
        assert len(targets) == len(logprobs) == len(plan.samples)
        for index, tokens, values in zip(batch.sample_ids, targets, logprobs, strict=True):
            seen[index] = tuple(tokens.tolist())
            assert torch.equal(values, torch.tensor(samples[index].rollout_logprobs))
        assert not batch.rollout_logprobs[batch.mask == 0].any()
        assert int((batch.sequence_index >= 0).sum()) == sum(samples[i].total_tokens for i in plan.samples)
    assert seen == {i: s.tokens for i, s in enumerate(samples)}


@given(SHAPES, st.sampled_from([2, 4]))
@settings(deadline=None)
def test_context_slices_join_to_the_whole(shapes: list[tuple[int, int]], context: int) -> None:
    samples = [make_sample(p, r, 100 * i) for i, (p, r) in enumerate(shapes)]
    plan = plan_microbatches([s.total_tokens for s in samples], 1, 10_000, 2 * context).ranks[0][0]
    batch = pack(samples, range(len(samples)), range(1, len(samples) + 1), plan, 2 * context)
    parts = [slice_context(batch, context, rank) for rank in range(context)]
    for name in (
        "tokens",
        "targets",
        "mask",
        "positions",
        "sequence_index",
        "advantages",
        "loss_weights",
        "rollout_logprobs",
    ):
        joined = join_context([getattr(part, name) for part in parts], batch.lengths)
        assert torch.equal(joined, getattr(batch, name)), name
    assert all(part.lengths == batch.lengths for part in parts)
    assert all(part.total_tokens * context == batch.total_tokens for part in parts)


def test_a_rank_holds_its_chunk_and_the_mirror_of_every_sequence() -> None:
    batch = pack(
        [make_sample(4, 4, 0), make_sample(8, 8, 100)], [0, 0], [1, 1], MicroBatchPlan((0, 1), (8, 16)), align=8
    )
    assert slice_context(batch, 4, 1).tokens.tolist() == [1, 6, 102, 103, 112, 113]
    assert slice_context(batch, 2, 0).tokens.tolist() == [0, 1, 6, 7, 100, 101, 102, 103, 112, 113, 114, 115]
    assert slice_context(batch, 1, 0) is batch


def test_padding_to_a_size_is_a_sequence_of_its_own() -> None:
    plain = pack({3: make_sample(2, 3)}, [0, 0, 0, 1.0], [0, 0, 0, 0.5], MicroBatchPlan((3,), (8,)), align=4)
    padded = pack(
        {3: make_sample(2, 3)}, [0, 0, 0, 1.0], [0, 0, 0, 0.5], MicroBatchPlan((3,), (8,)), align=4, pad_to=20
    )
    assert padded.lengths == (8, 12)
    assert padded.sample_ids == (3,)
    assert padded.positions.tolist() == [*range(8), *range(12)]
    assert padded.sequence_index[8:].eq(-1).all()
    for name in ("tokens", "targets", "mask", "advantages", "loss_weights", "rollout_logprobs"):
        assert torch.equal(getattr(padded, name), torch.cat([getattr(plain, name), torch.zeros_like(padded.mask[8:])]))
    assert torch.equal(*(gather_responses(batch.targets, batch)[0] for batch in (plain, padded)))
    assert pack({}, [], [], MicroBatchPlan(), align=4, pad_to=20).lengths == (20,)
