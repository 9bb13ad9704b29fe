"""What reports and the live view say of runs that are no RL with groups, and of runs with few evaluations."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_mp.config.load import check_settings, dump_settings
from grpo_mp.monitor.report.curves import charts_of
from grpo_mp.monitor.report.page import scores_tables
from grpo_mp.monitor.rules import find_warnings
from grpo_mp.monitor.run_folder import RunRecords, read_run
from grpo_mp.monitor.watch import curves
from grpo_mp.trainer.metrics import rollout_metrics
from tests.minimal_settings import MINIMAL_SETTINGS
from tests.report.test_report import make_run
from tests.trainer.test_metrics import INFOS


def supervised(step: int) -> dict[str, float]:
    """Held-out rows of two sets are scored every second step."""
    line = {"step": float(step), "sft/loss": 2.0 - 0.1 * step}
    return line | ({"eval/sums/loss": 1.5, "eval/code/loss": 2.5} if step % 2 == 0 else {})


def make_supervised(folder: Path) -> RunRecords:
    folder.mkdir()
    (folder / "settings.yaml").write_text(dump_settings(check_settings(MINIMAL_SETTINGS, "test")))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(supervised(step)) + "\n" for step in range(1, 7)))
    return read_run(folder)


def test_each_set_of_held_out_rows_has_a_line(tmp_path: Path) -> None:
    run = make_supervised(tmp_path / "run")
    (loss,) = (chart for chart in charts_of("policy", run) if chart.title == "Supervised loss")
    assert {line.name: line.values[-1] for line in loss.series} == {
        "train": 1.4,
        "held out sums": 1.5,
        "held out code": 2.5,
    }


def test_the_live_view_shows_the_losses_of_a_supervised_run_and_of_a_critic() -> None:
    lines: list[Any] = [supervised(step) | {"critic/explained_variance": 0.4} for step in range(1, 7)]
    console = Console(width=120)
    with console.capture() as shown:
        console.print(curves(lines))
    for words in ("loss", "loss sums", "loss code", "explained", "1.400", "40%"):
        assert words in shown.get()


def test_one_evaluation_has_no_change(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", 4))
    (table,) = scores_tables(run)
    assert table.rows[0] == ("held_out", "avg@2", "25.0% ± 1.0", "75.0% ± 1.0", "+50.0 points")
    first = RunRecords("run", {}, run.metrics, {0: run.scores[0]}, {})
    (table,) = scores_tables(first)
    assert table.rows[0][2:] == ("", "25.0% ± 1.0", "")


def test_a_healthy_run_without_groups_has_no_warning() -> None:
    alone = [info for info in INFOS if info.index == 0]
    metrics = rollout_metrics(alone, weight_version=4)
    assert not {"reward/group_std", "reward/zero_std_ratio"} & metrics.keys()
    assert {"reward/group_std", "reward/zero_std_ratio"} <= rollout_metrics(INFOS, weight_version=4).keys()
    equal = {"reward/group_std": 0.0, "reward/zero_std_ratio": 1.0}
    steps = [{"step": float(step)} | equal for step in range(1, 11)]
    assert {found.rule for found in find_warnings(steps)} == {"no_signal", "zero_variance"}
    assert find_warnings([line | {"critic/value_loss": 0.2} for line in steps]) == ()


def test_entropy_that_collapses_is_found_where_nothing_says_what_is_right() -> None:
    falling = [{"step": float(step), "train/entropy": 0.5 if step <= 20 else 0.02} for step in range(1, 41)]
    assert [found.rule for found in find_warnings(falling)] == ["entropy_collapse"]
    solved = [line | {"rollout/accuracy": 0.9} for line in falling]
    assert find_warnings(solved) == ()


def test_a_judge_of_another_scale_is_no_form() -> None:
    steps = [{"step": float(step), "reward/term/judge": 4.2, "rollout/accuracy": 0.02} for step in range(1, 21)]
    assert find_warnings(steps) == ()
    assert [one.rule for one in find_warnings([line | {"reward/term/boxed": 0.9} for line in steps])] == [
        "format_without_answer"
    ]
