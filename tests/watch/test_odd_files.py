"""`grpo-mp watch` of a run whose files hold what no run writes: it is left out, and the frame comes."""

import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from grpo_mp.monitor.watch.screen import Frame
from grpo_mp.monitor.watch.state import MetricFile, RunReader
from grpo_mp.rollout.engine_load import read_loads

DEEP = "[" * 100_000
GOOD = '{"step": 1, "reward/mean": 0.5}\n'


def shown(run: Path) -> str:
    console = Console(width=120, record=True, file=open(os.devnull, "w"), highlight=False)  # noqa: SIM115
    console.print(Frame(RunReader(run).read()))
    return console.export_text()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "samples").mkdir()
    (tmp_path / "engines").mkdir()
    (tmp_path / "settings.yaml").write_text("run: {steps: 40}\n")
    (tmp_path / "metrics.jsonl").write_text(GOOD)
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 10, "reward/mean": "x"}',
        '{"step": 10, "reward/mean": {}}',
        '{"step": true, "reward/mean": 1}',
        '{"step": 1%s}' % ("0" * 400),
        DEEP,
        '{"a":' * 100_000,
        "\x00\x01",
        "[1]",
    ],
    ids=lambda line: line[:20],
)
def test_lines_that_are_no_metrics_are_left_out(run: Path, line: str) -> None:
    (run / "metrics.jsonl").write_text(f'{GOOD}{line}\n{{"step": 2, "reward/mean": 0.75}}\n')
    assert MetricFile(run / "metrics.jsonl").read() == [
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "reward/mean": 0.75},
    ]
    assert "step 2/40" in shown(run)


@pytest.mark.parametrize("value", ["1e308", "-1e308", "NaN", "-Infinity", "1" + "0" * 400])
def test_numbers_that_nothing_can_be_computed_with_are_none(run: Path, value: str) -> None:
    lines = [
        f'{{"step": {step}, "reward/mean": {value if step > 1 else 0.5}, "time/step_s": {value}}}'
        for step in range(1, 50)
    ]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert {line["reward/mean"] for line in MetricFile(run / "metrics.jsonl").read()} == {0.5, None}
    assert "no number" in shown(run)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_numbers_are_drawn(run: Path, sign: int) -> None:
    lines = [f'{{"step": {step}, "reward/mean": {sign * (-1) ** step * 1e300}}}' for step in range(200)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert "curves" in shown(run)


def test_values_of_a_sample_that_are_none_are_left_out(run: Path) -> None:
    lines = ['{"response": "worst", "reward": 1.0}', '{"response": "odd", "reward": "x", "prompt": 3}', DEEP]
    lines += ['{"response": "best", "reward": 2.0}', '{"response": "far", "reward": 1e999}']
    (run / "samples" / "step_000001.jsonl").write_text("\n".join(lines) + "\n")
    said = shown(run)
    assert "best" in said
    assert "samples of step 1" in said


def test_lines_of_an_engine_that_are_none_are_left_out(run: Path) -> None:
    good = {"time_s": 1.0, "state": "works", "running": 3, "queued": None, "tokens_per_s": 10.0}
    odd = [{"time_s": "x"}, {"state": 1}, {"running": "3"}, {"time_s": None}, {"tokens_per_s": 1e308}, {"queued": []}]
    lines = [json.dumps(one) for one in (good, *(good | each for each in odd))]
    (run / "engines" / "engine_0.jsonl").write_text("\n".join([*lines, DEEP, "5"]) + "\n")
    (load,) = read_loads(run)[0]
    assert load.running == 3
    assert "engines" in shown(run)
