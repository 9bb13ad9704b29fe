"""The planner's micro-batches are those that the trainer makes of the assumed lengths."""

from dataclasses import replace
from statistics import fmean

import pytest

from grpo_mp.batching.updates import PackingRule, plan_updates
from grpo_mp.planner.job import response_lengths
from tests.planner.jobs import job_of

LONG = {"prompts_per_step": 128, "group_size": 8, "max_prompt_tokens": 2048, "max_response_tokens": 32768}


@pytest.mark.parametrize("mean", [1.0, 4096.0, 32768.0])
def test_assumed_responses_have_the_mean_and_the_limit(mean: float) -> None:
    responses = response_lengths(256, mean, 32768)
    assert len(responses) == 256
    assert 1 <= min(responses) <= max(responses) <= 32768
    assert fmean(responses) == pytest.approx(mean, rel=0.01)


@pytest.mark.parametrize("layout", [{"tensor": 4, "pipeline": 4, "context": 2}, {"tensor": 4}])
def test_plan_has_the_micro_batches_of_the_trainer(layout: dict[str, int]) -> None:
    training = {"max_tokens_per_microbatch": 16384, "updates_per_step": 4}
    job = job_of("qwen2.5-7b", "h100-80", 16, layout=layout, rollout=LONG, training=training)
    job = replace(job, mean_response_tokens=6000.0)
    lengths = [1024 + response for response in response_lengths(256, 6000.0, 32768)]
    (update,) = plan_updates(lengths, 1, PackingRule(job.settings.layout, job.dp_size, 16384, job.model.hidden_size))
    size = update.padded_size
    ranks = [sum(size or plan.tokens for plan in rank) for rank in update.schedule.ranks]
    assert job.packing.microbatches == update.schedule.microbatches
    assert job.packing.load_factor == pytest.approx(max(ranks) / (sum(lengths) / job.dp_size))
    assert job.packing.load_factor >= 1
