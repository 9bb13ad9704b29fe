"""`grpo-mp sample` on two engines, killed by kill -9 and begun again, gives the rows of one engine left alone."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from transformers import AutoModelForCausalLM

from grpo_mp.data.prompts import read_pass_rates
from grpo_mp.rollout.journal import read_records
from grpo_mp.trainer.sampling.answers import PASS_RATES, SAMPLES, SUMMARY
from tests.conftest import TRAIN_PROMPTS, TinyRun
from tests.e2e.conftest import StartJob, outcome
from tests.e2e.jobs import read_jsonl

HELD = (5, 20, 41, 55)  # prompts whose answers are not scored before the job is killed
SAMPLES_EACH = 4
KEPT_EACH = 3
# Answers to some questions are not scored until there is a file `go`.
REWARD = """
import time
from pathlib import Path

def letters(prompts, completions, **_):
    while prompts[0] in {questions} and not Path({go!r}).exists():
        time.sleep(0.02)
    return [sum(map(str.isalpha, text)) / 10 for text in completions]
"""
Rows = Sequence[dict[str, Any]]


def command(ranks: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "grpo_mp", "sample", "--ranks", str(ranks))


def recorded(folder: Path) -> int:
    return sum(len(read_records(file)) for file in folder.glob("groups/*/*.journal"))


@pytest.fixture(scope="module")
def folders(tiny_run: TinyRun, start_job: StartJob, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Of two engines, killed and begun again, and of one that nothing disturbed; and what the former printed."""
    folder = tmp_path_factory.mktemp("sampled")
    questions = [read_jsonl(tiny_run.train)[prompt]["question"] for prompt in HELD]
    (folder / "reward.py").write_text(REWARD.format(questions=questions, go=str(folder / "go")))
    settings = (
        f"reward={{answer: 1.0, timeout_s: 600, functions: {{{folder / 'reward.py'}:letters: 1.0}}}}",
        f"sample.filters=[distinct, {{best: {{k: {KEPT_EACH}}}}}]",
        "engine.deterministic=true",
        "engine.concurrent_groups=8",  # two rounds and more
    )
    two = folder / "two"
    one = folder / "one"
    killed = start_job(*settings, "--out", str(two), command=command(2))
    killed.wait_until(lambda: recorded(two) == TRAIN_PROMPTS - len(HELD))
    killed.end()
    journal = next(two.glob("groups/*/rank_1.journal"))
    journal.write_bytes(journal.read_bytes()[:-5])  # as where it is killed amid a record
    (folder / "go").touch()
    again = outcome(start_job(*settings, "--out", str(two), command=command(2)))
    assert (again.status, again.left) == (0, [])
    assert [line.partition(" is cut or damaged ")[0] for line in again.err.splitlines()] == [str(journal)]
    undisturbed = outcome(start_job(*settings, "layout.expert=1", "--out", str(one), command=command(1)))
    assert (undisturbed.status, undisturbed.err) == (0, "")
    return two, one, again.out


def rows_of(folder: Path) -> Rows:
    rows: Rows = parquet.read_table(folder / SAMPLES).to_pylist()
    return rows


@pytest.mark.nightly
def test_rows_are_those_of_one_engine_that_nothing_disturbed(folders: tuple[Path, Path, str]) -> None:
    two, one, _ = folders
    rows = rows_of(two)
    assert rows == rows_of(one)
    assert [(row["prompt_index"], row["index"]) for row in rows] == sorted(
        {(row["prompt_index"], row["index"]) for row in rows}
    )
    assert {row["prompt_index"] for row in rows} == set(range(TRAIN_PROMPTS))
    assert (two / PASS_RATES).read_text() == (one / PASS_RATES).read_text()


@pytest.mark.nightly
def test_only_what_was_not_recorded_is_generated_again(folders: tuple[Path, Path, str]) -> None:
    two, one, printed = folders
    before = TRAIN_PROMPTS - len(HELD) - 1
    assert f"{before} of {TRAIN_PROMPTS} prompts were answered before" in printed
    summary = json.loads((two / SUMMARY).read_text())
    assert (summary["last_start"]["prompts"], summary["last_start"]["engines"]) == (len(HELD) + 1, 2)
    undisturbed = json.loads((one / SUMMARY).read_text())
    assert undisturbed["last_start"]["samples"] == TRAIN_PROMPTS * SAMPLES_EACH
    assert undisturbed["last_start"]["tokens_per_s"] > 0
    del summary["last_start"], undisturbed["last_start"]
    assert summary == undisturbed


@pytest.mark.nightly
def test_counts_are_those_of_the_rows(folders: tuple[Path, Path, str], tiny_run: TinyRun) -> None:
    two, _, _ = folders
    rows = rows_of(two)
    summary = json.loads((two / SUMMARY).read_text())
    assert summary["answered_prompts"] == TRAIN_PROMPTS
    assert summary["samples"] == TRAIN_PROMPTS * SAMPLES_EACH
    assert summary["kept"] == len(rows) == summary["samples"] - sum(summary["dropped"].values())
    rates = read_pass_rates(str(two / PASS_RATES))
    assert rates.keys() == {row["question"] for row in read_jsonl(tiny_run.train)}
    assert sum(rates.values()) / TRAIN_PROMPTS == pytest.approx(summary["accuracy"])


@pytest.mark.nightly
@torch.no_grad()
def test_logprobs_are_those_of_transformers(folders: tuple[Path, Path, str], tiny_run: TinyRun) -> None:
    policy = AutoModelForCausalLM.from_pretrained(tiny_run.model, dtype=torch.float32).eval()
    for row in rows_of(folders[0])[::40]:
        tokens = torch.tensor([row["prompt_tokens"] + row["tokens"]])
        logprobs = policy(tokens).logits[0].log_softmax(-1)[len(row["prompt_tokens"]) - 1 : -1]
        expected = logprobs.gather(1, torch.tensor(row["tokens"])[:, None])[:, 0]
        assert row["logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)
        assert row["messages"][-1] == {"role": "assistant", "content": row["response"]}
