"""A step's samples over updates, data-parallel ranks context-parallel ranks and micro-batches, and back."""

import random
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mp.batching.microbatches import MicroBatchSchedule, plan_microbatches
from grpo_mp.batching.packing import gather_responses
from grpo_mp.batching.updates import PackingRule, UpdatePlan, alignment, microbatches, plan_updates
from grpo_mp.config.sections import LayoutConfig, TrainingConfig
from grpo_mp.utils.types import MicroBatch, Sample, copy_to
from tests.batching.helpers import join_context

LAYOUTS = [
    LayoutConfig(tensor=tensor, context=context, pipeline=pipeline, virtual_pipeline=virtual)
    for tensor, context, (pipeline, virtual) in product((1, 2, 4), (1, 2), ((1, None), (2, None), (2, 2), (4, 3)))
]
MAX_TOKENS = 48
HIDDEN = 64


def make_samples(count: int, seed: int) -> list[Sample]:
    draw = random.Random(seed)
    samples = []
    for number in range(count):
        prompt = draw.randint(1, 10)
        response = draw.randint(1, 40)
        tokens = tuple(range(1000 * number, 1000 * number + prompt + response))
        logprobs = (0.0,) * response
        teacher = tuple(float(-token) for token in tokens[prompt:])
        samples.append(
            Sample(
                *(0, number, tokens[:prompt], tokens[prompt:], logprobs, (0,) * response),
                truncated=False,
                teacher_logprobs=teacher,
            )
        )
    return samples


def plan(samples: list[Sample], updates: int, layout: LayoutConfig, dp_size: int) -> tuple[UpdatePlan, ...]:
    lengths = [sample.total_tokens for sample in samples]
    return plan_updates(lengths, updates, PackingRule(layout, dp_size, MAX_TOKENS, HIDDEN))


def joined_batches(
    update: UpdatePlan, samples: list[Sample], layout: LayoutConfig, data_rank: int
) -> list[dict[str, object]]:
    """Join the micro-batches of one data-parallel rank's context-parallel ranks, made from its samples only."""
    local_samples = {i: samples[i] for i in update.samples_of(data_rank)}
    advantages = [float(i) for i in range(len(samples))]
    weights = [1.0 / (len(update.samples) * len(samples[i].tokens)) for i in update.samples]
    ranks = [
        microbatches(update, local_samples, advantages, weights, data_rank, rank) for rank in range(layout.context)
    ]
    return [join_context_parts(parts) for parts in zip(*ranks, strict=True)]


def join_context_parts(parts: tuple[MicroBatch, ...]) -> dict[str, object]:
    values = {
        name: join_context([getattr(part, name) for part in parts], parts[0].lengths)
        for name in (
            "targets",
            "mask",
            "advantages",
            "loss_weights",
            "sequence_index",
            "tokens",
            "positions",
            "rollout_logprobs",
        )
    }
    batch = MicroBatch(**values, lengths=parts[0].lengths, sample_ids=parts[0].sample_ids)
    if parts[0].sample_ids:
        values["teacher"] = join_context([part.teacher_logprobs for part in parts], batch.lengths)
    else:  # of padding alone
        values["teacher"] = torch.zeros_like(values["mask"])
        assert all(part.teacher_logprobs is None for part in parts)
    per_token = ("targets", "advantages", "loss_weights", "teacher")
    per_sample = {name: gather_responses(values[name], batch) for name in per_token}
    return {"ids": batch.sample_ids, "lengths": batch.lengths, "mask": values["mask"], **per_sample}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dp_size", "updates"), [(1, 1), (2, 3), (3, 2)])
def test_every_sample_is_trained_on_once_with_its_own_numbers(layout: LayoutConfig, dp_size: int, updates: int) -> None:
    samples = make_samples(12, seed=dp_size)
    planned_updates = plan(samples, updates, layout, dp_size)
    assert [i for update in planned_updates for i in update.samples] == list(range(12))
    assert {len(update.samples) for update in planned_updates} == {12 // updates}
    seen = []
    for update in planned_updates:
        total = 0.0
        for data_rank in range(dp_size):
            for batch in joined_batches(update, samples, layout, data_rank):
                names = ("ids", "targets", "advantages", "loss_weights", "teacher")
                columns = zip(*(batch[name] for name in names), strict=True)
                for number, targets, advantages, weights, teacher in columns:
                    sample = update.samples[number]
                    seen.append(sample)
                    assert tuple(targets.tolist()) == samples[sample].tokens
                    assert tuple(teacher.tolist()) == samples[sample].teacher_logprobs
                    assert set(advantages.tolist()) == {float(sample)}
                    total += float(weights.sum())
        assert total == pytest.approx(1.0, rel=1e-5)
    assert sorted(seen) == list(range(12))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_have_equally_many_micro_batches_of_legal_sizes(layout: LayoutConfig) -> None:
    samples = make_samples(13, seed=9)
    (update,) = plan(samples, 1, layout, dp_size=3)
    ranks = [joined_batches(update, samples, layout, data_rank) for data_rank in range(3)]
    assert len({len(rank) for rank in ranks}) == 1
    if layout.virtual_pipeline:
        assert len(ranks[0]) % layout.pipeline == 0
    lengths = [batch["lengths"] for rank in ranks for batch in rank]
    assert all(length % alignment(layout) == 0 for batch in lengths for length in batch)
    sizes = {sum(batch) for batch in lengths}
    if layout.pipeline > 1:
        assert len(sizes) == 1
    longest = max(sample.total_tokens for sample in samples)
    assert max(sizes) < max(MAX_TOKENS, longest) + alignment(layout)


def test_every_rank_gets_a_micro_batch_with_fewer_samples_than_ranks() -> None:
    for layout in LAYOUTS:
        samples = make_samples(2, seed=1)
        (update,) = plan(samples, 1, layout, dp_size=4)
        ranks = [joined_batches(update, samples, layout, data_rank) for data_rank in range(4)]
        assert sorted(len(update.samples_of(data_rank)) for data_rank in range(4)) == [0, 0, 1, 1]
        for rank in ranks:
            assert len(rank) == len(ranks[0]) >= 1
            assert all(bool(batch["mask"].any()) == bool(batch["ids"]) for batch in rank)


def test_sequences_are_aligned_for_tensor_and_context_parallelism() -> None:
    layouts = (LayoutConfig(), LayoutConfig(tensor=4), LayoutConfig(tensor=2, context=4, pipeline=2))
    assert [alignment(layout) for layout in layouts] == [1, 4, 16]


@pytest.mark.parametrize(("pipeline", "virtual"), [(2, None), (4, None), (4, 2)])
@pytest.mark.parametrize("dp_size", [1, 2])
def test_long_tailed_lengths_leave_little_padding_with_a_pipeline(
    pipeline: int, virtual: int | None, dp_size: int
) -> None:
    draw = random.Random(pipeline)
    lengths = [draw.randint(50, 2048) + min(32768, int(draw.lognormvariate(8.7, 1.0))) for _ in range(1024)]
    assert max(lengths) > 2 * 16384
    layout = LayoutConfig(tensor=8, context=4, pipeline=pipeline, virtual_pipeline=virtual)
    updates = plan_updates(lengths, 4, PackingRule(layout, dp_size, max_tokens=16384, hidden_size=7168))
    sizes = [update.padded_size for update in updates]
    padded = sum(size * dp_size * update.schedule.microbatches for size, update in zip(sizes, updates, strict=True))
    assert max(sizes) < max(lengths) + alignment(layout)
    # Interleaving wants a multiple of the pipeline: up to pipeline - 1 micro-batches of an update are there for that.
    multiple = dp_size * (pipeline - 1) * sum(sizes) if virtual else 0
    assert (padded - multiple) / sum(lengths) < 1.05


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_microbatches_in_fp8_have_whole_rows_of_each_rank(layout: LayoutConfig) -> None:
    """With the same samples, in micro-batches as before, and a dummy one, which is padded, too."""
    training = TrainingConfig(fp8_format="e4m3")
    rows = 128 if layout.tensor > 1 else 16
    multiple = training.padding_multiple(layout)
    assert (multiple, TrainingConfig().padding_multiple(layout)) == (rows * layout.tensor * layout.context, 1)
    samples = make_samples(5, seed=3)
    lengths = [sample.total_tokens for sample in samples]
    plans = (plan_updates(lengths, 2, PackingRule(layout, 2, MAX_TOKENS, HIDDEN, each)) for each in (1, multiple))
    for plain, update in zip(*plans, strict=True):
        assert [[plan.samples for plan in rank] for rank in update.schedule.ranks] == [
            [plan.samples for plan in rank] for rank in plain.schedule.ranks
        ]
        for data_rank in range(2):
            own = {i: samples[i] for i in update.samples_of(data_rank)}
            weights = [1.0] * len(update.samples)
            for batch in microbatches(update, own, [0.0] * 5, weights, data_rank, context_rank=0):
                assert len(batch.tokens) % (rows * layout.tensor) == 0
                assert sum(batch.lengths) == len(batch.tokens) * layout.context


def test_micro_batches_reach_a_gpu_from_pinned_memory_and_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: calls.append("pinned") or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, **how: calls.append((device.type, how)) or tensor)
    experts = torch.arange(24).view(2, 3, 4)[:, 1]
    copied = copy_to(experts, torch.device("cuda"))
    assert calls == ["pinned", ("cuda", {"non_blocking": True})]
    assert copied.is_contiguous()  # otherwise the copy would include the experts of the other layers
    assert copied.equal(experts)


def check_schedule(
    schedule: MicroBatchSchedule, lengths: list[int], ranks: int, capacity: int, align: int, multiple: int
) -> None:
    plans = [plan for rank in schedule.ranks for plan in rank]
    assert len(schedule.ranks) == ranks
    assert {len(rank) for rank in schedule.ranks} == {schedule.microbatches}
    assert schedule.microbatches % multiple == 0
    assert schedule.microbatches >= 1
    assert sorted(sample for plan in plans for sample in plan.samples) == list(range(len(lengths)))
    for plan in plans:
        for sample, padded in zip(plan.samples, plan.lengths, strict=True):
            assert padded % align == 0
            assert 0 <= padded - lengths[sample] < align
        assert plan.tokens <= capacity or len(plan.samples) == 1


@given(
    st.lists(st.integers(1, 60), max_size=40),
    st.integers(1, 5),
    st.integers(1, 100),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.01, 1.0]),
)
@settings(max_examples=500)
def test_every_plan_is_legal_and_deterministic(
    lengths: list[int], ranks: int, capacity: int, align: int, multiple: int, quadratic: float
) -> None:
    costs = [length + quadratic * length**2 for length in lengths]
    schedule = plan_microbatches(lengths, ranks, capacity, align, multiple, costs)
    check_schedule(schedule, lengths, ranks, capacity, align, multiple)
    assert schedule == plan_microbatches(tuple(lengths), ranks, capacity, align, multiple, costs)


def test_long_tailed_lengths_balance_over_ranks_and_microbatches() -> None:
    draw = random.Random(0)
    lengths = [min(8192, 16 + int(draw.lognormvariate(6, 1))) for _ in range(1024)]
    schedule = plan_microbatches(lengths, 8, 16384, 16, multiple=2)
    totals = [sum(plan.tokens for plan in rank) for rank in schedule.ranks]
    assert max(totals) / (sum(totals) / 8) < 1.01
    for k in range(schedule.microbatches):
        together = [rank[k].tokens for rank in schedule.ranks]
        assert max(together) / (sum(together) / 8) < 1.02
