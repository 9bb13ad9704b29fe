"""`grpo-mp plan --simulate`, in this process."""

from pathlib import Path

import pytest

from tests.cli.command import run_command

CONFIG = Path(__file__).parents[2] / "configs" / "qwen2_5_7b.yaml"


def test_a_table_of_schedules_and_numbers_of_gpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("100\n900\n" * 8)
    simulate = ("plan", CONFIG, "--simulate", "--steps", "2", "--staleness", "0,1", "--lengths", lengths)
    result = run_command(capsys, *simulate, "--gpus", "7,8,16", "--drop-rate", "0.2", "--engine-mtbf-hours", "1")
    assert result.status == 0, result.err
    rows = [line.split() for line in result.out.splitlines() if "%" in line and not line[1:2].isdigit()]
    schedules = ["colocated", "colocated", "one_step_off", "async"]
    assert [row[0] for row in rows[:8]] == schedules * 2
    assert [row[2] for row in rows[:8]] == ["8"] * 4 + ["16"] * 4
    assert "left out: --gpus 7: " in result.out
    assert "is fastest" in result.out


def test_the_settings_own_division(capsys: pytest.CaptureFixture[str]) -> None:
    divided = ("schedule=async", "engine.ranks=2")
    result = run_command(capsys, "plan", CONFIG, *divided, "--simulate", "--steps", "2", "--gpus", "8,16")
    assert result.status == 0, result.err
    rows = [line.split() for line in result.out.splitlines() if line.startswith(" async")]
    assert [row[2:4] for row in rows] == [["8", "2"]] * 3 + [["16", "4"]] * 3


def test_what_is_left_out_for_its_staleness_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_command(capsys, "plan", CONFIG, "--simulate", "--steps", "2", "--gpus", "8", "--staleness", "0,4")
    assert result.status == 0, result.err
    assert "left out: one_step_off with --staleness 0,4: it needs staleness 1\n" in result.out
    assert "no division" not in result.out


def test_tokens_ahead_is_told_to_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    simulate = ("--simulate", "--steps", "2", "--gpus", "8", "--schedule", "colocated", "--staleness", "1")
    ahead = ("rollout.max_staleness=1", "rollout.tokens_ahead=64")
    with_it, without = (
        run_command(capsys, "plan", CONFIG, *overrides, *simulate).out for overrides in (ahead, ahead[:1])
    )
    assert "left out: rollout.tokens_ahead=64: " in with_it
    assert "are simulated faster than they are" in " ".join(with_it.split())
    assert "tokens_ahead" not in without


@pytest.mark.timeout(300)
def test_a_filter_that_drops_nearly_all_ends(capsys: pytest.CaptureFixture[str]) -> None:
    simulate = ("--simulate", "--steps", "2", "--gpus", "8", "--schedule", "colocated", "--staleness", "0")
    small = ("rollout.prompts_per_step=8", "training.updates_per_step=1")
    result = run_command(capsys, "plan", CONFIG, *small, *simulate, "--drop-rate", "0.995")
    assert result.status == 0, result.err
    assert "is fastest" in result.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--staleness", "1,many"), "expected a whole number from 0 to 1,000, got many"),
        (("--staleness", "-1"), "from 0 to 1,000"),
        (("--gpus", "8,0"), "expected a positive integer, got 0"),
        (("--gpus", "7"), "no schedule is possible"),
        (("--schedule", "sometimes"), "invalid choice"),
        (("--lengths", "nowhere.txt"), "no such file"),
        (("--schedule", "async", "--staleness", "0"), "--staleness 0: async needs a staleness of 1 or more"),
        (("--drop-rate", "1"), "must keep some groups"),
        (("--drop-rate", "0.9995"), "give 0.999 or less"),
    ],
)
def test_mistakes_are_told(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    result = run_command(capsys, "plan", CONFIG, "--simulate", *arguments)
    assert result.status
    assert words in result.err
