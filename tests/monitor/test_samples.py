"""Sampled answers as JSON lines and as TensorBoard text."""

import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np

from grpo_mp.monitor.evaluation import EvalScore, step_file, write_scores
from grpo_mp.monitor.samples import (
    drop_later_files,
    sample_lines,
    samples_to_markdown,
    write_eval_samples,
    write_samples,
)
from grpo_mp.utils.types import Prompt, Sample, SampleGroup


def make_group(group_id: int, rewards: tuple[float, ...] = (0.0, 1.5, 0.5)) -> SampleGroup:
    samples = tuple(
        Sample(
            group_id=group_id,
            index=index,
            prompt_tokens=(1, 2),
            tokens=(3, 4),
            rollout_logprobs=(-0.1, -0.2),
            weight_versions=(6, 7),
            truncated=index == 0,
            text=f"answer {group_id}.{index}\n<b>é</b>",
            reward=reward,
            reward_terms={"answer": reward - 0.5},
            extra={"found": f"{index}"},
        )
        for index, reward in enumerate(rewards)
    )
    return SampleGroup(Prompt(group_id, f"question {group_id}", (1, 2), answer="4"), samples)


def test_objects_that_json_lacks_are_written_as_text() -> None:
    """Reward functions hand over what they have: numbers of numpy, dates."""
    (sample,) = make_group(0, (1.0,)).samples
    group = SampleGroup(
        make_group(0).prompt, (replace(sample, extra={"score": np.float32(0.5), "day": date(2026, 1, 2)}),)
    )
    (line,) = sample_lines([group], set="aime")
    assert json.loads(line)["set"] == "aime"
    assert json.loads(line)["extra"] == {"score": "0.5", "day": "2026-01-02"}


def test_jsonl_holds_whole_groups(tmp_path: Path) -> None:
    write_samples(tmp_path, 12, [make_group(0), make_group(2)])
    path = tmp_path / "samples" / "step_000012.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(row["group_id"], row["index"]) for row in rows] == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (2, 2)]
    assert rows[1] == {
        "prompt": "question 0",
        "expected": "4",
        "response": "answer 0.1\n<b>é</b>",
        "reward": 1.5,
        "terms": {"answer": 1.0},
        "is_correct": None,
        "extra": {"found": "1"},
        "truncated": False,
        "tokens": 2,
        "prompt_tokens": 2,
        "weight_version": [6, 7],
        "prompt_index": 0,
        "group_id": 0,
        "index": 1,
    }


def test_markdown_shows_best_and_worst() -> None:
    text = samples_to_markdown([make_group(5)])
    assert text.index("answer 5.1") < text.index("answer 5.0")
    assert "answer 5.2" not in text
    assert "    found: 1" in text
    assert "\n    <b>é</b>" in text


def test_resume_removes_evaluations_of_the_attempt_that_was_lost(tmp_path: Path) -> None:
    """Killed at 33, resumed from 20: until step 30 is there again, the last evaluation is that of step 20."""
    for step in (0, 20, 30):
        write_scores(step_file(tmp_path, step), {"held_out": EvalScore(0.5, 1.0, 9.0)}, step=step)
        write_eval_samples(tmp_path, step, {"held_out": [make_group(0)]})
    drop_later_files(tmp_path, first_step=21)
    assert sorted(path.name for path in (tmp_path / "eval").iterdir()) == ["step_000000.json", "step_000020.json"]
    left = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert left == ["eval_000000.jsonl", "eval_000020.jsonl"]


def test_answers_to_an_eval_set_stand_beside_its_name_and_replace_those_of_the_step(tmp_path: Path) -> None:
    for _ in range(2):
        write_eval_samples(tmp_path, 20, {"a": [make_group(0)], "b": [make_group(1)]})
    rows = [json.loads(line) for line in (tmp_path / "samples" / "eval_000020.jsonl").read_text().splitlines()]
    assert [row["set"] for row in rows] == ["a"] * 3 + ["b"] * 3
