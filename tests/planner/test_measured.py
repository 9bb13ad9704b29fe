"""Measured steps are read and compared with what is expected of their recipes."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from grpo_mp.planner.clusters import Efficiency, read_cluster
from grpo_mp.planner.measured import COLUMNS, FITTED, MEASURED, compare, read_measured
from grpo_mp.planner.memory import SubPhase
from grpo_mp.planner.plan import make_plan
from grpo_mp.utils.errors import UserError
from tests.bench.fit_rates import log_error
from tests.cli.command import run_command


def test_half_of_the_measured_steps_check_the_rates() -> None:
    steps = read_measured(MEASURED)
    fitted = [step for step in steps if step.fitted]
    assert len(fitted) in (len(steps) // 2, (len(steps) + 1) // 2)
    assert {step.job.world_size for step in steps} >= {16, 32, 96, 128, 256}


def test_errors_are_those_of_the_two_times() -> None:
    for row in compare(read_measured(MEASURED)[:1]):
        assert len(row) == len(COLUMNS)
        for expected, error in (row[3:5], row[5:7]):
            assert float(error.rstrip("%")) / 100 == pytest.approx(float(expected) / float(row[2]) - 1, abs=0.06)


def test_lower_rates_take_longer() -> None:
    step = next(step for step in read_measured(MEASURED) if step.name.startswith("Llama"))
    half = Efficiency(matmul=0.15, device_memory=0.3, link=0.35)
    assert step.expected_s("train", half) == pytest.approx(2 * step.expected_s("train"), rel=0.02)
    assert step.expected_s("step", half) < 2 * step.expected_s("step")


def test_a_step_has_its_weight_sync() -> None:
    step = next(step for step in read_measured(MEASURED) if step.name.startswith("Llama"))
    plan = make_plan(step.job)
    without_check = plan.step_s - plan.times[SubPhase.CHECK].expected_s
    assert step.expected_s("step") == pytest.approx(without_check)
    assert plan.times[SubPhase.SYNC].expected_s > 1


@pytest.mark.slow
def test_the_fitted_rates_are_the_best_on_the_rows_that_made_them() -> None:
    """Better than those of each neighbour on the grid, and than those that the profile assumes."""
    steps = [step for step in read_measured(MEASURED) if step.fitted]
    for name, fitted in FITTED.items():
        rows = [step for step in steps if step.job.cluster.name == name]
        others = [replace(fitted, matmul=fitted.matmul + change) for change in (-0.05, 0.05)]
        others += [replace(fitted, device_memory=fitted.device_memory + change) for change in (-0.05, 0.05)]
        errors = [
            sum(log_error(step, rates) ** 2 for step in rows)
            for rates in (fitted, *others, read_cluster(name).achievable)
        ]
        assert errors[0] == min(errors)


def test_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one small row: the page of the planner, which is tested to be up to date, has the table of all."""
    file = tmp_path / "measured.yaml"
    rows = [row for row in yaml.safe_load(MEASURED.read_text("utf-8")) if row["name"].startswith("Llama-3.1-8B, 16")]
    file.write_text(yaml.safe_dump(rows), encoding="utf-8")
    result = run_command(capsys, "plan", "--against", str(file))
    assert result.status == 0, result.err
    assert "Llama-3.1-8B, 16 H100" in result.out
    assert "plans assume matmul 30%, device_memory 60%" in result.out


@pytest.mark.parametrize("text", ["{}", "- {name: x}"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "measured.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=r"measured\.yaml: "):
        read_measured(file)
