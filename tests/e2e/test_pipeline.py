"""Three stages on two ranks: stopped in one, killed in another, and begun again until all is done."""

import re
import signal
import sys
from pathlib import Path

import pytest
import yaml
from pyarrow import parquet

from grpo_mp.pipeline.runner import STOPPED
from tests.conftest import TinyRun
from tests.e2e.jobs import Job, read_jsonl, spans
from tools.tiny.arithmetic import make_problems, worked_response, write_rows

COMMAND = (sys.executable, "-m", "grpo_mp", "pipeline", "--ranks", "2")


@pytest.fixture
def file(tiny_run: TinyRun, tmp_path: Path) -> Path:
    rows = [
        {"prompt": problem.question, "completion": worked_response(problem)}
        for problem in make_problems(16, 0, seed=0, largest=9)[0]
    ]
    write_rows(rows, tmp_path / "chats.jsonl")
    settings = yaml.safe_load(tiny_run.config.read_text())
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(settings))
    sft = {name: settings[name] for name in ("model", "layout", "optimizer")}
    sft |= {"run": {"folder": "unused", "steps": 2}, "data": {"train": str(tmp_path / "chats.jsonl")}}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump({**sft, "sft": {"batch_size": 8, "max_tokens": 64}}))
    held_out = {"arithmetic": {"path": str(tiny_run.folder / "eval.jsonl"), "samples": 2}}
    stages = {
        "start": {"command": "sft", "config": "sft.yaml"},
        "rl": {
            "command": "train",
            "config": "rl.yaml",
            "settings": {"model.path": "{start}/final", "run.save_every": 1, "run.steps": 3, "data.eval": {}},
        },
        "found": {
            "command": "sample",
            "config": "rl.yaml",
            "settings": {"model.path": "{rl}/final", "sample.max_prompts": 8},
            "evaluation": None,
        },
    }
    pipeline = {
        "folder": str(tmp_path / "out"),
        "evaluation": {"config": "rl.yaml", "settings": {"data.eval": held_out}},
        "stages": stages,
    }
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(pipeline, sort_keys=False))
    return tmp_path / "pipeline.yaml"


@pytest.mark.nightly
def test_a_pipeline_goes_on_where_it_was_stopped_or_killed(
    file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    jobs: list[Job] = []

    def start() -> Job:
        jobs.append(Job(tmp_path_factory.mktemp("job"), [str(file)], COMMAND))
        return jobs[-1]

    out = file.parent / "out"
    try:
        stopped = start()
        stopped.wait_until(lambda: (out / "rl").exists() and spans(out / "rl", 0, "TRAIN") >= 1)
        stopped.signal(signal.SIGTERM)
        assert (stopped.wait(), stopped.err) == (STOPPED, "")
        assert "pipeline: rl was stopped: the same command resumes it" in stopped.out
        assert stopped.left() == []
        trained = (out / "start/final/config.json").stat().st_mtime_ns
        steps = len(read_jsonl(out / "rl/metrics.jsonl"))
        assert 2 <= steps < 4

        killed = start()
        killed.wait_until(lambda: (out / "found").exists())
        killed.signal(signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
        assert killed.left() == []
        assert "pipeline: start" not in killed.out
        assert [line["step"] for line in read_jsonl(out / "rl/metrics.jsonl")] == [0, 1, 2, 3]

        last = start()
        assert (last.wait(), last.err) == (0, "")
        assert [line for line in last.out.splitlines() if line.startswith("pipeline:")] == ["pipeline: found"]
        assert (out / "start/final/config.json").stat().st_mtime_ns == trained
        assert set(parquet.read_table(out / "found/samples.parquet")["prompt_index"].to_pylist()) <= set(range(8))
        table = (out / "scores.md").read_text()
        assert re.findall(r"^\| (\w+) \| arithmetic \|", table, re.MULTILINE) == ["start", "rl"]
        assert table in last.out

        again = start()
        assert (again.wait(), again.err) == (0, "")
        assert "pipeline:" not in again.out
    finally:
        for job in jobs:
            job.end()
