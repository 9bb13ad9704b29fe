"""The report of a run whose files somebody else has edited, copied or cut: a page, or one sentence."""

from pathlib import Path

import pytest

from grpo_mp.cli.main import main
from tests.report.test_report import make_run, metrics, write_lines


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_values_that_are_too_large_to_draw_are_gaps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    far = [
        metrics(step) | {"reward/mean": sign * 1e308, "time/step_s": 1e308} for step, sign in enumerate((1, -1, 1), 1)
    ]
    write_lines(run / "metrics.jsonl", [*far, {**metrics(4), "reward/mean": 10**400}, metrics(5)])  # type: ignore[list-item]
    assert main(["report", str(run)]) == 0
    near = [metrics(step) | {"reward/mean": (-1) ** step * 1e300, "time/train_s": 1e300} for step in range(1, 5)]
    write_lines(run / "metrics.jsonl", near)  # type: ignore[arg-type]
    assert main(["report", str(run)]) == 0
