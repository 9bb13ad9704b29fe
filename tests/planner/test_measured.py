"""Measured steps are read and compared with what is expected of their recipes."""

from pathlib import Path

import pytest

from grpo_mp.errors import UserError
from grpo_mp.planner.clusters import Efficiency
from grpo_mp.planner.measured import COLUMNS, MEASURED, compare, read_measured
from tests.cli.command import run_command


def test_half_of_the_measured_steps_check_the_rates() -> None:
    steps = read_measured(MEASURED)
    fitted = [step for step in steps if step.fitted]
    assert len(fitted) in (len(steps) // 2, (len(steps) + 1) // 2)
    assert {step.job.world_size for step in steps} >= {16, 32, 96, 128, 256}


def test_errors_are_those_of_the_two_times() -> None:
    for row in compare(read_measured(MEASURED)[:1]):
        cells = dict(zip(COLUMNS, row, strict=True))
        error = float(cells["expected s"]) / float(cells["measured s"]) - 1
        assert float(cells["error"].rstrip("%")) / 100 == pytest.approx(error, abs=0.06)


def test_lower_rates_take_longer() -> None:
    step = next(step for step in read_measured(MEASURED) if step.name.startswith("Llama"))
    half = Efficiency(matmul=0.15, device_memory=0.3, link=0.35)
    assert step.expected_s("train", half) == pytest.approx(2 * step.expected_s("train"), rel=0.02)
    assert step.expected_s("step", half) < 2 * step.expected_s("step")


def test_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_command(capsys, "plan", "--against", str(MEASURED))
    assert result.status == 0, result.err
    assert "Llama-3.1-8B, 16 H100" in result.out


@pytest.mark.parametrize("text", ["{}", "- {name: x}"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "measured.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=r"measured\.yaml: "):
        read_measured(file)
