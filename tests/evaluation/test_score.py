"""The score of a set: by problem, only of what is judged, under documented names; as file and picture."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_mp.errors import UserError
from grpo_mp.evaluation.files import read_scores, step_file, write_scores
from grpo_mp.evaluation.pass_at_k import Estimate
from grpo_mp.evaluation.picture import draw, write_svg
from grpo_mp.evaluation.score import EvalScore, Votes, score
from grpo_mp.monitor.metrics import find
from grpo_mp.trainer.metrics import eval_metrics
from grpo_mp.types import SampleInfo


def samples(*problems: str) -> tuple[list[SampleInfo], Votes]:
    """A letter is a sample: R right, a to z a wrong answer, - wrong without answer, ? not judged; 4 tokens, 1 cut."""
    infos: list[SampleInfo] = []
    votes = {}
    for group_id, letters in enumerate(problems):
        for index, letter in enumerate(letters):
            parts = {"answer": float(letter == "R")}
            info = SampleInfo(group_id, index, 0, 9, 4, parts["answer"] / 2, letter == "-", 0, parts)
            infos.append(replace(info, right=letter == "R" if letter != "?" else None))
            votes[info.key] = None if letter == "-" else ord(letter)
    return infos, votes


def test_a_problem_counts_as_much_as_another() -> None:
    infos, votes = samples("RRab", "aab-")
    found = score(infos, votes)
    assert (found.accuracy, found.accuracy_error) == (0.25, 0.25)
    assert (found.problems, found.samples, found.length, found.reward, found.truncated_ratio) == (2, 4, 4, 0.125, 0.125)
    assert {k: (one.value, one.error) for k, one in found.pass_at.items()} == {
        1: (0.25, 0.25),
        2: pytest.approx((5 / 12, 5 / 12)),
        4: (0.5, 0.5),
    }
    # Of six pairs of RRab one is RR, and four have one R and one other, half a vote each.
    assert found.maj_at == {1: Estimate(0.25, 0.25), 2: Estimate(0.25, 0.25), 4: Estimate(0.5, 0.5)}


def test_without_answers_there_is_no_majority() -> None:
    found = score(samples("Ra", "aa")[0])
    assert (found.maj_at, list(found.pass_at)) == ({}, [1, 2])


def test_of_one_sample_and_of_one_problem() -> None:
    one, several = score(*samples("R", "a")), score(*samples("Ra"))
    assert (one.accuracy, one.pass_at, one.maj_at) == (0.5, {}, {})
    assert several.accuracy_error is None
    assert "eval/x/accuracy_se" not in eval_metrics("x", several)


def test_samples_that_nothing_judges_are_left_out() -> None:
    infos, votes = samples("R?", "??", "aa")
    found = score(infos, votes)
    assert (found.accuracy, found.length, found.pass_at[2], found.problems) == (0.5, 4, Estimate(0.0), 3)
    assert score(samples("??")[0]).accuracy is None


def test_metrics_carry_the_set_s_name_and_are_documented() -> None:
    found = eval_metrics("my set", score(*samples("RRa", "aab")))
    assert found == pytest.approx(
        {
            "eval/my_set/accuracy": 1 / 3,
            "eval/my_set/accuracy_se": 1 / 3,
            "eval/my_set/reward": 1 / 6,
            "eval/my_set/length": 4,
            "eval/my_set/truncated_ratio": 0,
            "eval/my_set/pass_at_1": 1 / 3,
            "eval/my_set/pass_at_2": 1 / 2,
            "eval/my_set/pass_at_3": 1 / 2,
            "eval/my_set/maj_at_1": 1 / 3,
            "eval/my_set/maj_at_2": 1 / 3,
            "eval/my_set/maj_at_3": 1 / 2,
        }
    )
    assert all(find(name, "scalar") for name in found)
    assert find("eval/pass_at_k", "image")


def test_scores_come_back_from_their_file(tmp_path: Path) -> None:
    scores = {"a": score(*samples("RRa", "aab")), "b": EvalScore(None, 0.5, 4.0)}
    file = step_file(tmp_path, 20)
    write_scores(file, scores, step=20)
    assert read_scores(file) == scores
    assert json.loads(file.read_text())["step"] == 20
    file.write_text("{}")
    with pytest.raises(UserError, match=r"step_000020\.json: no scores of an evaluation"):
        read_scores(file)


def test_the_picture_has_a_line_for_before_and_after(tmp_path: Path) -> None:
    before, after = score(*samples("Raa", "aab")), score(*samples("RRR", "Rab"))
    figure = draw({"a": before, "b": before}, {"a": after, "b": after, "one": EvalScore(1.0, 1.0, 4.0)})
    assert figure is not None
    assert len(figure.axes) == 2
    drawn = {line.get_label(): line.get_ydata() for line in figure.axes[0].get_lines()}
    assert drawn.keys() == {"before: pass@k", "before: maj@k", "after: pass@k", "after: maj@k"}
    assert drawn["before: pass@k"] == pytest.approx([1 / 6, 1 / 3, 1 / 2])
    assert drawn["after: pass@k"] == pytest.approx([2 / 3, 5 / 6, 1])
    write_svg(figure, tmp_path / "one.svg")
    write_svg(figure, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert draw({}, {"one": EvalScore(1.0, 1.0, 4.0)}) is None
