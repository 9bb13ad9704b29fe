"""The score of a set: by problem, only of what is judged, under documented names; as file and plot."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_mp.monitor.evaluation import (
    Estimate,
    EvalScore,
    Votes,
    read_scores,
    score_eval_set,
    step_file,
    write_scores,
)
from grpo_mp.monitor.metrics import find_metric
from grpo_mp.trainer.metrics import eval_metrics
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import SampleInfo


def samples(*problems: str) -> tuple[list[SampleInfo], Votes]:
    """A letter is a sample: R right, a to z a wrong answer, - wrong without answer, ? not judged; 4 tokens, 1 cut."""
    infos: list[SampleInfo] = []
    votes = {}
    for group_id, letters in enumerate(problems):
        for index, letter in enumerate(letters):
            parts = {"answer": float(letter == "R")}
            info = SampleInfo(group_id, index, 9, 4, parts["answer"] / 2, letter == "-", 0, parts)
            infos.append(replace(info, is_correct=letter == "R" if letter != "?" else None))
            votes[info.key] = None if letter == "-" else ord(letter)
    return infos, votes


def test_a_problem_counts_as_much_as_another() -> None:
    infos, votes = samples("RRab", "aab-")
    actual = score_eval_set(infos, votes)
    assert (actual.accuracy, actual.accuracy_error) == (0.25, 0.25)
    assert (actual.problems, actual.samples, actual.length) == (2, 4, 4)
    assert (actual.reward, actual.truncated_ratio) == (0.125, 0.125)
    assert actual.reward_terms == {"answer": 0.25}
    assert {k: (estimate.value, estimate.error) for k, estimate in actual.pass_at.items()} == {
        1: (0.25, 0.25),
        2: pytest.approx((5 / 12, 5 / 12)),
        4: (0.5, 0.5),
    }
    assert actual.maj_at == {4: Estimate(0.5, 0.5)}


def test_a_reward_term_is_a_mean_over_samples_to_which_it_applies() -> None:
    infos, _ = samples("RRab")
    some = [replace(infos[0], reward_terms={"answer": 1.0, "form": 0.5}), *infos[1:]]
    assert score_eval_set(some).reward_terms == {"answer": 0.5, "form": 0.5}


def test_without_answers_there_is_no_majority() -> None:
    actual = score_eval_set(samples("Ra", "aa")[0])
    assert (actual.maj_at, list(actual.pass_at)) == ({}, [1, 2])


def test_of_one_sample_and_of_one_problem() -> None:
    one_sample = score_eval_set(*samples("R", "a"))
    one_problem = score_eval_set(*samples("Ra"))
    assert (one_sample.accuracy, one_sample.pass_at, one_sample.maj_at) == (0.5, {}, {})
    assert one_problem.accuracy_error is None
    assert "eval/x/accuracy_se" not in eval_metrics("x", one_problem)


def test_samples_that_nothing_judges_are_left_out() -> None:
    infos, votes = samples("R?", "??", "aa")
    actual = score_eval_set(infos, votes)
    assert (actual.accuracy, actual.length, actual.pass_at[2], actual.problems) == (0.5, 4, Estimate(0.0), 3)
    assert score_eval_set(samples("??")[0]).accuracy is None


def test_problems_that_are_too_long_are_wrong() -> None:
    """The score is that of a set in which the policy got them wrong; what it wrote is averaged over the others."""
    infos, votes = samples("RRab", "RRRR")
    actual = score_eval_set(infos, votes, too_long=2)
    wrong = score_eval_set(*samples("RRab", "RRRR", "----", "----"))
    assert (actual.accuracy, actual.accuracy_error) == (0.375, wrong.accuracy_error)
    assert (actual.pass_at, actual.maj_at) == (wrong.pass_at, wrong.maj_at)
    assert (actual.problems, actual.too_long) == (4, 2)
    asked = score_eval_set(infos, votes)
    assert (actual.reward, actual.length, actual.truncated_ratio) == (asked.reward, asked.length, asked.truncated_ratio)
    assert score_eval_set(samples("??")[0], too_long=2).accuracy is None


def test_metrics_carry_the_set_s_name_and_are_documented() -> None:
    actual = eval_metrics("my set", score_eval_set(*samples("RRa", "aab")))
    assert actual == pytest.approx(
        {
            "eval/my_set/accuracy": 1 / 3,
            "eval/my_set/accuracy_se": 1 / 3,
            "eval/my_set/reward": 1 / 6,
            "eval/my_set/length": 4,
            "eval/my_set/truncated_ratio": 0,
            "eval/my_set/unanswered": 0,
            "eval/my_set/pass_at_1": 1 / 3,
            "eval/my_set/pass_at_2": 1 / 2,
            "eval/my_set/pass_at_3": 1 / 2,
            "eval/my_set/maj_at_3": 1 / 2,
        }
    )
    assert all(find_metric(name, "scalar") for name in actual)


def test_scores_are_read_back_from_their_file(tmp_path: Path) -> None:
    scores = {"a": score_eval_set(*samples("RRa", "aab")), "b": EvalScore(None, 0.5, 4.0)}
    file = step_file(tmp_path, 20)
    write_scores(file, scores, step=20)
    assert read_scores(file) == scores
    assert json.loads(file.read_text())["step"] == 20
    sets = json.loads(file.read_text())["sets"]
    point = sets["a"]["pass_at"]["2"]
    for text in (
        "{}",
        "[",
        json.dumps({"sets": {"a": sets["a"] | {"accuracy": "0.5"}}}),
        json.dumps({"sets": {"a": sets["a"] | {"pass_at": {"2": point | {"value": []}}}}}),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=r"step_000020\.json: no scores of an evaluation"):
            read_scores(file)
