"""Supervised fine-tuning on two ranks: a killed run ends as one that is not, bit for bit, and leaves the same."""

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from grpo_mp.monitor.metrics import TABLE
from grpo_mp.monitor.report.page import build_report, settings_table
from grpo_mp.monitor.run_folder import read_run
from grpo_mp.sft import main
from tests.conftest import TinyRun
from tests.e2e.jobs import Job, read_jsonl
from tests.launch.cluster import wait_until
from tests.parallel import peft_model
from tests.parallel.full_model import exceeding, relative_errors
from tools.tiny.arithmetic import make_problems, worked_response, write_rows

SFT = (sys.executable, "-m", "grpo_mp", "sft", "--ranks", "2")
ONE_RANK = (sys.executable, "-m", "grpo_mp.sft")
# The last step has what is left of the epoch
STEPS = 5
BATCH = 16
SAMPLES = 68
TIMES = re.compile(r"(time|speed|memory)/.*")
WRITTEN = {
    "sft/loss",
    "sft/length/mean",
    "sft/length/max",
    "sft/learned_ratio",
    "sft/epoch",
    "eval/{set}/loss",
    "train/entropy",
    "train/grad_norm",
    "train/lr",
    "train/updates",
    "train/skipped_updates",
    "train/tokens",
    "train/padding_ratio",
    "train/optimizer_step",
    "train/samples_seen",
    "train/expert_load/max_over_mean",
    "speed/train_tokens_per_s",
    "speed/samples_per_s",
    "speed/tokens_per_s_per_gpu",
    "time/step_s",
    "time/{phase}_s",
    "time/idle_share",
    "time/overhead_share",
    "memory/{phase}/host_bytes",
    "memory/{phase}/device_bytes",
    "memory/{phase}/peak_device_bytes",
}


@dataclass(frozen=True)
class Runs:
    """Two runs of the same settings: one that was never disturbed, and one that was killed after its third step."""

    undisturbed: Path
    killed: Path
    lines_at_kill: int
    out: str  # of the second start of the killed run


@pytest.fixture(scope="module")
def config(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    train, held_out = make_problems(SAMPLES, 10, seed=0, largest=9)
    for name, problems in (("train", train), ("held_out", held_out)):
        rows = ({"prompt": problem.question, "completion": worked_response(problem)} for problem in problems)
        write_rows(rows, folder / f"{name}.jsonl")
    settings = {
        "run": {"folder": str(folder / "run"), "epochs": 1, "save_every": 2, "eval_every": 2, "export_every": 2},
        "model": {"path": str(tiny_run.model), "dtype": "float32"},
        "layout": {"expert": 2},
        "data": {"train": str(folder / "train.jsonl"), "eval": {"sums": str(folder / "held_out.jsonl")}},
        "sft": {"batch_size": BATCH, "max_tokens": 64},
        "optimizer": {"lr": 3e-3, "lr_schedule": "linear", "warmup_updates": 1},
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(settings))
    return folder / "sft.yaml"


@pytest.fixture(scope="module")
def start(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Job]]:
    """Starts two ranks in a run folder, or one, with settings laid over those of `config`."""
    jobs: list[Job] = []

    def start_job(run: Path, *overrides: str, command: Sequence[str] = SFT) -> Job:
        jobs.append(Job(tmp_path_factory.mktemp("job"), [str(config), f"run.folder={run}", *overrides], command))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.end()


@pytest.fixture(scope="module")
def runs(config: Path, start: Callable[..., Job]) -> Runs:
    undisturbed = config.parent / "undisturbed"
    killed = config.parent / "killed"
    job = start(undisturbed)
    assert job.wait() == 0, job.err
    job = start(killed)
    metrics = killed / "metrics.jsonl"
    job.wait_until(lambda: metrics.exists() and '"step": 3' in metrics.read_text())
    job.signal(signal.SIGKILL, rank=1)
    assert job.wait() != 0
    lines = len(read_jsonl(metrics))
    job = start(killed)
    assert job.wait() == 0, job.err
    return Runs(undisturbed, killed, lines, job.out)


def numbers(run: Path) -> list[dict[str, float]]:
    """The lines of a run without what the clock and the machine decide."""
    return [
        {name: value for name, value in line.items() if not TIMES.fullmatch(name)}
        for line in read_jsonl(run / "metrics.jsonl")
    ]


def exported(run: Path) -> dict[str, torch.Tensor]:
    """The weights of the folder at the end."""
    files = sorted((run / "final").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_a_killed_run_goes_on_with_the_same_numbers(runs: Runs) -> None:
    assert runs.lines_at_kill < STEPS + 1
    assert "killed: resumes after step 2; " in runs.out
    assert [line["step"] for line in numbers(runs.undisturbed)] == list(range(STEPS + 1))
    assert numbers(runs.killed) == numbers(runs.undisturbed)
    one, other = (exported(run) for run in (runs.undisturbed, runs.killed))
    assert one.keys() == other.keys()
    assert len(one) > 20
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_is_not_resumed_on_other_rows(runs: Runs, config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = config.parent / "train.jsonl"
    again = [str(config), f"run.folder={runs.undisturbed}"]
    rows = data.read_text()
    main([*again, "--dry-run", "--ranks", "2"])
    assert capfd.readouterr().err == ""
    try:
        data.write_text(rows.replace("1", "2"))
        with pytest.raises(SystemExit) as end:
            main([*again, "--dry-run", "--ranks", "2"])
    finally:
        data.write_text(rows)
    assert end.value.code == 2
    assert "the rows of data.train are no longer those of the run's first 5 steps" in capfd.readouterr().err


def test_it_learns_all_of_the_data_once(runs: Runs) -> None:
    before, *steps = numbers(runs.undisturbed)
    assert [line["train/samples_seen"] for line in steps] == [16, 32, 48, 64, 68]
    assert steps[-1]["sft/epoch"] == 1.0
    losses = [line["eval/sums/loss"] for line in (before, *steps) if "eval/sums/loss" in line]
    assert len(losses) == 4  # before, after 2 and 4, and the last step
    assert losses == sorted(losses, reverse=True)
    assert steps[0]["sft/loss"] > steps[-1]["sft/loss"]


def test_it_leaves_what_a_run_leaves(runs: Runs) -> None:
    for run in (runs.undisturbed, runs.killed):
        settings = yaml.safe_load((run / "settings.yaml").read_text())
        assert settings["run"]["steps"] == STEPS
        names = {"trace.json", "report.html", "tensorboard", "final", "checkpoints", "logs"}
        assert names <= {path.name for path in run.iterdir()}
        assert [path.name for path in sorted((run / "exports").iterdir())] == ["step_000002", "step_000004"]
        assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step_000004", "step_000005"]
        assert json.loads((run / "final" / "config.json").read_text())["model_type"] == "deepseek_v3"


def test_written_metrics_are_those_that_are_listed(runs: Runs) -> None:
    written = {name for line in read_jsonl(runs.undisturbed / "metrics.jsonl") for name in line} - {"step", "time"}
    rows = [row for row in TABLE if row.name in WRITTEN]
    assert len(rows) == len(WRITTEN)
    assert [name for name in written if not any(row.matches(name) for row in rows)] == []
    assert [row.name for row in rows if not any(row.matches(name) for name in written)] == []


def test_the_report_has_its_losses_and_settings(runs: Runs) -> None:
    records = read_run(runs.undisturbed)
    table = settings_table(records)
    assert table.columns == ("setting", "value")
    assert ("sft.batch_size", str(BATCH)) in table.rows
    charts = {chart.title: chart for section in build_report(records).sections for chart in section.charts}
    assert [series.name for series in charts["Supervised loss"].series] == ["train", "held out sums"]
    assert len(charts["Supervised loss"].series[0].values) == STEPS


@pytest.mark.slow
def test_adapters_alone_learn_and_peft_loads_them(start: Callable[..., Job], tiny_run: TinyRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    lora = ("model.lora={rank: 8, alpha: 32}", "optimizer.lr=0.01", "optimizer.lr_schedule=constant", "run.epochs=2")
    job = start(run, "run.eval_every=0", "run.export_every=0", *lora)
    assert job.wait() == 0, job.err
    losses = [line["sft/loss"] for line in read_jsonl(run / "metrics.jsonl") if "sft/loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    by_peft = peft_model.merged_state(peft_model.load_peft(tiny_run.model, run / "final_adapter"))
    final = dict(peft_model.load(run / "final").state_dict())
    assert not exceeding(relative_errors(final, dict(by_peft)), 1e-6)
    assert exceeding(relative_errors(final, dict(peft_model.load(tiny_run.model).state_dict())), 1e-6)


def test_epochs_that_are_added_have_all_of_the_data(start: Callable[..., Job], tmp_path: Path) -> None:
    """The last step of the first epoch had four samples: the second has no sample less for it."""
    run = tmp_path / "run"
    alone = ("layout.expert=1", "data.eval={}", "run.export_every=0", "monitor.report=true")
    for epochs, steps in ((1, STEPS), (2, 2 * STEPS)):
        job = start(run, f"run.epochs={epochs}", *alone, command=ONE_RANK)
        assert job.wait() == 0, job.err
        assert yaml.safe_load((run / "settings.yaml").read_text())["run"]["steps"] == steps
    ends = [(line["train/samples_seen"], line["sft/epoch"]) for line in numbers(run) if line["step"] in (STEPS, steps)]
    assert ends == [(SAMPLES, 1.0), (2 * SAMPLES, 2.0)]
    rates = [line["train/lr"] for line in numbers(run) if line["step"] > STEPS]
    assert rates == sorted(rates, reverse=True)  # one schedule to the new end
    assert rates[-1] > 0.0


@pytest.mark.slow
def test_gradients_above_the_limit_are_skipped(start: Callable[..., Job], tmp_path: Path) -> None:
    limits = ("optimizer.skip_grad_norm=1e-9", "layout.expert=1", "data.eval={}", "monitor.report=false")
    job = start(tmp_path / "run", *limits, command=ONE_RANK)
    assert job.wait() == 2
    assert "; the run stops after 3 skipped updates" in job.err
    assert "step 1: update skipped, 1 in a row" in job.out


@pytest.mark.slow
def test_a_run_that_a_guard_or_a_signal_stops_leaves_a_report_and_a_timeline(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    for name, limit, status in (("guard", "{sft/loss: {max: 0.0, steps: 2}}", 2), ("signal", "{}", 0)):
        run = tmp_path / name
        settings = (f"monitor.guards={limit}", "monitor.report=true", "data.eval={}")
        alone = ("layout.expert=1", "run.epochs=40", "run.save_every=0", "run.export_every=0")
        job = start(run, *settings, *alone, command=ONE_RANK)
        if name == "signal":
            metrics = run / "metrics.jsonl"
            job.wait_until(lambda metrics=metrics: metrics.exists() and '"step": 2' in metrics.read_text())
            job.signal(signal.SIGTERM)
        assert job.wait() == status, job.err
        wait_until((run / "report.html").exists, "the report")  # on a busy machine it outlives the run
        done = read_jsonl(run / "metrics.jsonl")[-1]["step"]
        assert 2 <= done < 170
        assert f"{done} of 170" in (run / "report.html").read_text()
        trained = [event for event in json.loads((run / "trace.json").read_text()) if event["name"] == "TRAIN"]
        assert len([event for event in trained if event["ph"] == "B"]) >= done
