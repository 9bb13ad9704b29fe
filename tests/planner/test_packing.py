"""Micro-batches as the planner counts them: those that the trainer's scheduler makes of the assumed lengths."""

from dataclasses import replace
from statistics import fmean, median

import pytest

from grpo_mp.batching.updates import padded_size, plan_updates
from grpo_mp.config import Layout
from grpo_mp.planner.packing import Lengths, pack_update, responses
from tests.planner.jobs import job_of

LONG = {"prompts_per_step": 128, "group_size": 8, "max_prompt_tokens": 2048, "max_response_tokens": 32768}


@pytest.mark.parametrize("mean", [1.0, 300.0, 4096.0, 16384.0, 32768.0])
def test_assumed_responses_have_the_mean_and_stay_within_the_limit(mean: float) -> None:
    found = responses(Lengths(256, 1024, mean, 32768))
    assert len(found) == 256
    assert 1 <= min(found) <= max(found) <= 32768
    assert fmean(found) == pytest.approx(mean, rel=0.01)


def test_assumed_responses_have_a_long_tail() -> None:
    found = responses(Lengths(1024, 1024, 6000.0, 32768))
    assert median(found) < 0.75 * fmean(found)
    assert max(found) == 32768


def test_a_shared_prompt_is_planned_once_for_what_lies_together() -> None:
    long_prompts, layout = Lengths(64, 4096, 500.0, 1000), Layout()
    shared = pack_update(replace(long_prompts, sharing=8), layout, 1, 40_000, 1024)
    tokens = sum(responses(long_prompts))
    assert shared.padded == pytest.approx((8 * 4096 + tokens) / (64 * 4096 + tokens), rel=2e-3)  # and 1 of it with each
    assert pack_update(long_prompts, layout, 1, 40_000, 1024).padded == pytest.approx(1)
    one_by_one = pack_update(replace(long_prompts, sharing=8), layout, 1, 4200, 1024)
    assert one_by_one.padded == pytest.approx(1)  # nothing lies together


@pytest.mark.parametrize("layout", [{"tensor": 4, "pipeline": 4, "context": 2}, {"tensor": 4}])
def test_a_plan_has_the_micro_batches_that_the_trainer_makes(layout: dict[str, int]) -> None:
    optimizer = {"lr": 1e-6, "max_tokens_per_microbatch": 16384, "updates_per_step": 4}
    job = job_of("qwen2.5-7b", "h100-80", 16, layout=layout, rollout=LONG, optimizer=optimizer)
    job = replace(job, response_tokens=6000.0)
    lengths = [1024 + response for response in responses(Lengths(256, 1024, 6000.0, 32768))]
    (update,) = plan_updates(lengths, 1, job.settings.layout, job.data_parallel, 16384, job.shape.hidden)
    size = padded_size(update.schedule, job.settings.layout)
    ranks = [sum(size or plan.tokens for plan in rank) for rank in update.schedule.ranks]
    assert job.packing.microbatches == update.schedule.microbatches
    assert job.packing.padded == pytest.approx(max(ranks) / (sum(lengths) / job.data_parallel))
    assert job.packing.padded >= 1
