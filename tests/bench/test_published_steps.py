"""Published steps are compared with what is expected of their recipes, and the page of the planner has the table."""

from pathlib import Path

import pytest

from grpo_mp.planner.clusters import Efficiency
from grpo_mp.planner.memory import SubPhase
from grpo_mp.planner.plan import make_plan
from tests.bench.published_steps import PublishedStep, read_steps, rows_of

PAGE = Path(__file__).parents[2] / "grpo_mp" / "planner" / "README.md"


@pytest.fixture(scope="module")
def steps() -> list[PublishedStep]:
    return read_steps()


def test_half_of_the_steps_check_the_rates(steps: list[PublishedStep]) -> None:
    fitted = [step for step in steps if step.fitted]
    assert len(fitted) in (len(steps) // 2, (len(steps) + 1) // 2)
    assert {step.job.world_size for step in steps} >= {16, 32, 96, 128, 256}


def test_the_page_has_the_table(steps: list[PublishedStep]) -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert not [row for row in rows_of(steps) if f"| {' | '.join(row)} |" not in lines]


def test_rates_and_weight_sync_count(steps: list[PublishedStep]) -> None:
    step = next(step for step in steps if step.name.startswith("Llama"))
    half = Efficiency(matmul=0.15, device_memory=0.3, link=0.35)
    assert step.expected_s("train", half) == pytest.approx(2 * step.expected_s("train"), rel=0.02)
    assert step.expected_s("step", half) < 2 * step.expected_s("step")
    plan = make_plan(step.job)
    assert step.expected_s("step") == pytest.approx(plan.step_s - plan.times[SubPhase.CHECK].expected_s)
    assert plan.times[SubPhase.SYNC].expected_s > 1
