"""The metric dictionary against a real run of two ranks: all is written, and the samples give the same numbers."""

import math
import re
import statistics
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_mp.monitor.metrics import TABLE
from tests.conftest import EVAL_PROMPTS
from tests.e2e.conftest import LAST_STEP, FinishedRun
from tests.e2e.jobs import read_jsonl

STEPS = range(1, LAST_STEP + 1)
GROUPS = 4
SIZE = 4
UPDATES = 2
RANKS = 2
# What runs of several turns, of speculative decoding, of a multi-token-prediction layer, trained indexers, a teacher or
# a critic, in float16, and of supervised fine-tuning write: tests of their own have these.
OF_EPISODES = ("rollout/episode", "time/episode/")
OF_OTHER_RUNS = (*OF_EPISODES, "train/mtp_", "distill/", "critic/", "sft/", "mismatch/mass_outside_kept")
ALSO_OF_OTHERS = {
    *("rollout/given_tokens/mean", "rollout/acceptance_length", "eval/{set}/loss", "train/loss_scale"),
    "train/indexer_loss",
}
SOLVE_RATES = {
    "none": (-1, 0),
    "to_25": (0, 0.25),
    "to_50": (0.25, 0.5),
    "to_75": (0.5, 0.75),
    "to_99": (0.75, 0.99),
    "all": (0.99, 1),
}
LAYOUT = "custom_scalars__config__"  # of TensorBoard's tab
TEXT = "/text_summary"  # what TensorBoard appends to the name of a text


@pytest.fixture(scope="module")
def run(finished_run: FinishedRun) -> Path:
    return finished_run.folder / "run"


@pytest.fixture(scope="module")
def events(run: Path) -> EventAccumulator:
    return EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0}).Reload()


@pytest.fixture(scope="module")
def lines(run: Path) -> list[dict]:
    return read_jsonl(run / "metrics.jsonl")[1:]


@pytest.fixture(scope="module")
def samples(run: Path) -> list[list[dict]]:
    """Every sample of each step, of both ranks' engines."""
    return [read_jsonl(run / "samples" / f"step_{step:06d}.jsonl") for step in STEPS]


def test_listed_and_written_metrics_are_the_same(events: EventAccumulator) -> None:
    tags: dict[str, list[str]] = events.Tags()
    written = {
        "scalar": set(tags["scalars"]),
        "histogram": set(tags["histograms"]),
        "text": {name.removesuffix(TEXT) for name in tags["tensors"] if name != LAYOUT},
        "image": set(tags["images"]),
    }
    for kind, names in written.items():
        rows = [metric for metric in TABLE if metric.kind == kind and metric.name not in ALSO_OF_OTHERS]
        rows = [metric for metric in rows if not metric.name.startswith(OF_OTHER_RUNS)]
        assert [row.name for row in rows if not any(row.matches(name) for name in names)] == []
        assert [name for name in names if not any(row.matches(name) for row in rows)] == []


def test_the_listed_phases_are_those_that_are_timed(lines: list[dict]) -> None:
    meaning = next(row.meaning for row in TABLE if row.name == "time/{phase}_s")
    listed = set(re.findall(r"\w+", meaning.partition(": ")[2]))
    timed = {name[len("time/") : -len("_s")] for line in lines for name in line if re.fullmatch(r"time/\w+_s", name)}
    assert listed - {"move"} == timed - {"step"}  # nothing is moved on a CPU


def test_routers_replay_the_experts_of_the_tokens_they_belong_to(lines: list[dict]) -> None:
    """In float32 engine and policy choose alike; one token beside, half of the experts would differ."""
    assert all(line["mismatch/router_diff_ratio"] < 0.01 for line in lines)


def groups_of(rows: list[dict]) -> list[list[dict]]:
    ids = sorted({row["group_id"] for row in rows})
    return [[row for row in rows if row["group_id"] == one] for one in ids]


def boxed(row: dict) -> str:
    r"""What stands in the last \boxed{} whose braces balance; nothing where there is none."""
    text = re.sub(r"\\[^b]", "  ", row["response"])  # an escaped brace is no brace
    for match in reversed(list(re.finditer(r"\\boxed\s*\{", text))):
        depths = list(accumulate((one == "{") - (one == "}") for one in text[match.end() - 1 :]))
        if 0 in depths:
            return text[match.end() : match.end() - 1 + depths.index(0)].strip()
    return ""


def is_right(row: dict) -> bool:
    try:
        return abs(float(boxed(row)) - float(row["expected"])) < 0.01
    except ValueError:
        return False


def letters(row: dict) -> float:
    return sum(map(str.isalpha, row["response"])) / 10


def recomputed(rows: list[dict]) -> dict[str, float]:
    """reward/ and rollout/ of a step from its samples alone, by the words of the dictionary."""
    groups = groups_of(rows)
    lengths = [row["tokens"] for row in rows]
    right = [is_right(row) for row in rows]
    formatted = [float(bool(boxed(row))) for row in rows]
    rewards = [r + 0.5 * b + letters(row) for r, b, row in zip(right, formatted, rows, strict=True)]
    in_group = [[rewards[rows.index(row)] for row in group] for group in groups]
    solved = [sum(map(is_right, group)) for group in groups]
    by_answer = {
        "correct": [n for n, r in zip(lengths, right, strict=True) if r],
        "incorrect": [n for n, r in zip(lengths, right, strict=True) if not r],
    }
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/group_std": statistics.fmean(map(statistics.pstdev, in_group)),
        "reward/zero_std_ratio": sum(len(set(group)) == 1 for group in in_group) / GROUPS,
        "reward/term/answer": statistics.fmean(right),
        "reward/term/boxed": statistics.fmean(formatted),
        "reward/term/letters": statistics.fmean(map(letters, rows)),
        "reward/log/most_letters": statistics.fmean(max(map(letters, group)) for group in groups),
        "reward/failures": 0,
        "reward/unscored": 0,
        "rollout/response_length/mean": statistics.fmean(lengths),
        "rollout/response_length/min": min(lengths),
        "rollout/response_length/max": max(lengths),
        **{f"rollout/response_length/{name}": statistics.fmean(values) for name, values in by_answer.items() if values},
        "rollout/prompt_length/mean": statistics.fmean(row["prompt_tokens"] for row in rows),
        "rollout/truncated_ratio": statistics.fmean(row["truncated"] for row in rows),
        "rollout/accuracy": statistics.fmean(right),
        "rollout/solve_all": solved.count(SIZE),
        "rollout/solve_none": solved.count(0),
        **{
            f"rollout/solve_rate/{name}": sum(low < n / SIZE <= high for n in solved) / GROUPS
            for name, (low, high) in SOLVE_RATES.items()
        },
        "rollout/groups": len(groups),
        "rollout/launched_groups": GROUPS,
        "rollout/carried_groups": 0,
        "rollout/length_bias": 1.0,
        "rollout/skipped_prompts": 0,
        **dict.fromkeys(
            (f"rollout/dropped_groups/{why}" for why in ("zero_std", "surplus", "unfinished", "aborted", "stale")), 0
        ),
    }


@pytest.mark.parametrize("step", STEPS)
def test_rewards_and_rollouts_follow_from_the_samples_of_all_ranks(
    step: int, samples: list[list[dict]], lines: list[dict]
) -> None:
    rows = samples[step - 1]
    line = lines[step - 1]
    assert [(row["group_id"], row["index"]) for row in rows] == [
        (GROUPS * (step - 1) + group, index) for group in range(GROUPS) for index in range(SIZE)
    ]
    versions = [UPDATES * (step - 1) - row["weight_version"][0] for row in rows]
    assert all(row["weight_version"][0] == row["weight_version"][1] for row in rows)
    expected = recomputed(rows) | {
        "rollout/weight_version_lag/mean": statistics.fmean(versions),
        "rollout/weight_version_lag/max": max(versions),
        "rollout/samples_without_routed_experts": 0,
    }
    actual = {name: value for name, value in line.items() if name.startswith(("reward/", "rollout/"))}
    assert actual == pytest.approx(expected)
    assert [row["is_correct"] for row in rows] == [is_right(row) for row in rows]
    assert [row["extra"] for row in rows] == [{"first word": row["response"].split(" ")[0]} for row in rows]


@pytest.mark.parametrize("step", STEPS)
def test_counts_and_speeds_follow_from_the_samples_of_all_ranks(
    step: int, samples: list[list[dict]], lines: list[dict]
) -> None:
    rows = samples[step - 1]
    line = lines[step - 1]
    response, prompt = (sum(row[name] for row in rows) for name in ("tokens", "prompt_tokens"))
    total_tokens = response + prompt
    expected = {
        "train/tokens": response,
        "train/updates": UPDATES,
        "train/optimizer_step": UPDATES * step,
        "train/samples_seen": GROUPS * SIZE * step,
        "train/skipped_updates": 0,
        "train/early_stopped_updates": 0,
        "sync/weight_version": UPDATES * step,
        "speed/generate_tokens_per_s": response / line["time/generate_s"],
        "speed/train_tokens_per_s": total_tokens / line["time/train_s"],
        "speed/logprob_tokens_per_s": 2 * total_tokens / line["time/logprob_s"],  # old policy and reference
        "speed/samples_per_s": len(rows) / line["time/step_s"],
        "speed/tokens_per_s_per_gpu": total_tokens / line["time/step_s"] / RANKS,
    }
    assert {name: line[name] for name in expected} == pytest.approx(expected)
    assert line["train/expert_load/max_over_mean"] >= 1
    assert all(math.isfinite(value) for value in line.values())


def test_histograms_hold_all_samples_of_all_ranks(events: EventAccumulator, samples: list[list[dict]]) -> None:
    columns: dict[str, list[list[Any]]] = {
        "reward/values": [[row["reward"] for row in rows] for rows in samples],
        "rollout/response_length/values": [[row["tokens"] for row in rows] for rows in samples],
        "rollout/solve_rate": [[sum(map(is_right, one)) / SIZE for one in groups_of(rows)] for rows in samples],
        "train/advantages": [[_advantage(row, rows) for row in rows] for rows in samples],
    }
    for name, steps in columns.items():
        histograms = [event.histogram_value for event in events.Histograms(name)]
        for histogram, values in zip(histograms, steps, strict=True):
            measured = (histogram.num, histogram.min, histogram.max, histogram.sum, histogram.sum_squares)
            squares = sum(value**2 for value in values)
            expected = (len(values), min(values), max(values), sum(values), squares)
            assert measured == pytest.approx(expected, rel=1e-5, abs=1e-5), name


def _advantage(row: dict, rows: list[dict]) -> float:
    group = [one["reward"] for one in rows if one["group_id"] == row["group_id"]]
    return (row["reward"] - statistics.fmean(group)) / (statistics.stdev(group) + 1e-4)


def test_answers_to_the_eval_set_are_shown_before_and_after(events: EventAccumulator) -> None:
    shown = events.Tensors(f"eval/arithmetic/samples{TEXT}")
    assert [event.step for event in shown] == [0, LAST_STEP]
    before, after = (event.tensor_proto.string_val[0].decode() for event in shown)
    prompts = re.findall(r"\*\*prompt (\d+)\*\*", before)
    assert len(prompts) == min(4, EVAL_PROMPTS)
    assert re.findall(r"\*\*prompt (\d+)\*\*", after) == prompts
    assert "first word:" in before
