import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.rewards.scorer import RewardStats, Scorer, sum_stats
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import SampleGroup
from tests.rewards.conftest import hurry

MakeGroup = Callable[..., SampleGroup]
FUNCTIONS = """
import asyncio, math, time
import torch

def length(completions, **columns): return [len(text) for text in completions]
def answer(completions, **columns): return [3.0] * len(completions)
def raises(completions, **columns): raise KeyError("gold")
def exits(completions, **columns): raise SystemExit(3)
def hangs(completions, **columns): time.sleep(3600)
def infinite(completions, **columns): return [0.0, math.inf] + [0.0] * (len(completions) - 2)
def short(completions, **columns): return [1.0]
def words(completions, **columns): return ["good"] * len(completions)
def tensor(completions, **columns): return torch.arange(len(completions))
def flags(completions, **columns): return [text == "b" for text in completions]
def even(completions, **columns): return [2.0 if i % 2 == 0 else None for i, _ in enumerate(completions)]
def never(completions, **columns): return [None] * len(completions)
def second(completions, **columns): return [None, 1.0, 3.0]
def logs(completions, log_metric, log_extra, trainer_state, **columns):
    log_extra("text", completions)
    log_metric("mine", trainer_state.global_step)
    return [trainer_state.max_steps] * len(completions)
async def waits(completions, **columns):
    await asyncio.sleep(0)
    return [4.0] * len(completions)
"""
FAILURES = {
    "raises": r"raised KeyError: 'gold'; sample 0: 'a'",
    "exits": r"raised SystemExit: 3",
    "hangs": r"took longer than reward.timeout_s=1 s",
    "infinite": r"returned inf, which is not finite; sample 1: 'b'",
    "short": r"returned 1 values for 3 samples",
    "words": r"raised ValueError: could not convert string to float: 'good'",
}


@pytest.fixture
def scorer(tmp_path: Path) -> Iterator[Callable[..., Scorer]]:
    """Makes scorers over the functions above, given by name and weight."""
    file = tmp_path / "mine.py"
    file.write_text(FUNCTIONS)
    made: list[Scorer] = []

    def make(functions: dict[str, float] | None = None, **settings: Any) -> Scorer:
        named = {f"{file}:{name}": weight for name, weight in (functions or {}).items()}
        made.append(Scorer(RewardConfig(functions=named, **settings), max_response_tokens=10, max_steps=60))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def rewards(group: SampleGroup) -> list[float]:
    return [sample.reward for sample in group.samples]


def test_parts_are_named_unweighted_and_summed_by_weight(scorer: Callable[..., Scorer], make_group: MakeGroup) -> None:
    built = scorer({"length": 0.01}, answer=1.0, boxed=0.5)
    group = make_group([r"3+4=7 \boxed{7}", r"\boxed{8}", "seven"])
    scored = built.score_group(group)
    assert [*built.term_weights] == ["answer", "boxed", "length"]
    assert [sample.reward_terms for sample in scored.samples] == [
        {"answer": 1.0, "boxed": 1.0, "length": 15.0},
        {"answer": 0.0, "boxed": 1.0, "length": 9.0},
        {"answer": 0.0, "boxed": 0.0, "length": 5.0},
    ]
    assert rewards(scored) == pytest.approx([1.65, 0.59, 0.05])
    assert scored.prompt is group.prompt
    assert all(a.tokens is b.tokens for a, b in zip(group.samples, scored.samples, strict=True))


@pytest.mark.parametrize(
    ("function", "expected"),
    [("tensor", [0, 1, 2]), ("flags", [0, 1, 0]), ("waits", [4, 4, 4]), ("logs", [60, 60, 60])],
)
def test_values_of_any_kind(
    function: str, expected: list[float], scorer: Callable[..., Scorer], make_group: MakeGroup
) -> None:
    scored = scorer({function: 1.0}).score_group(make_group(["a", "b", "c"]))
    assert rewards(scored) == expected
    assert all(type(value) is float for value in rewards(scored))


def test_samples_to_which_nothing_applies_get_the_mean(scorer: Callable[..., Scorer], make_group: MakeGroup) -> None:
    built = scorer({"second": 1.0, "never": 1.0})
    scored = built.score_group(make_group(["a", "b", "c"]))
    assert rewards(scored) == [2.0, 1.0, 3.0]
    assert [sample.is_scored for sample in scored.samples] == [False, True, True]
    assert built.take_stats().unscored == 1
    assert rewards(scorer({"never": 1.0}).score_group(make_group(["a", "b"]))) == [0.0, 0.0]


# The rule of many recipes as one function: 1.0 for the right answer and 0.5 for a box.
RULE = """
def rule(completions, **_):
    return [1.0 * ("\\\\boxed{7}" in text) + 0.5 * ("\\\\boxed" in text) for text in completions]
"""


@pytest.fixture
def rule(tmp_path: Path) -> str:
    (tmp_path / "rule.py").write_text(RULE)
    return f"{tmp_path / 'rule.py'}:rule"


def correctness(settings: dict[str, Any], group: SampleGroup) -> list[bool | None]:
    built = Scorer(RewardConfig(**settings), max_response_tokens=10)
    try:
        return [sample.is_correct for sample in built.score_group(group).samples]
    finally:
        built.close()


@pytest.mark.parametrize("functions", ["mine.py:rule", ["mine.py:rule"]])
def test_a_function_without_a_weight_counts_once(functions: Any) -> None:
    assert RewardConfig.model_validate({"functions": functions}).weights == {"rule": 1.0}


def test_correctness_is_decided_by_a_part_never_by_the_total(rule: str, make_group: MakeGroup) -> None:
    group = make_group([r"\boxed{7}", r"\boxed{8}", "seven"])
    functions = {"functions": {rule: 1.0}}
    assert correctness(functions, group) == [None, None, None]
    assert correctness(functions | {"correct": "rule"}, group) == [True, False, False]
    assert correctness({"answer": 1.0, "boxed": 0.5}, group) == [True, False, False]
    assert correctness(functions | {"answer": 1.0, "correct": "boxed"}, group) == [True, True, False]
    assert correctness({"boxed": 1.0, "correct": "answer"}, group) == [True, False, False]


def test_a_part_that_failed_or_does_not_apply_decides_nothing(
    scorer: Callable[..., Scorer], make_group: MakeGroup
) -> None:
    def correctness_by(name: str, **settings: Any) -> list[bool | None]:
        built = scorer({name: 1.0}, correct=name, **settings)
        return [sample.is_correct for sample in built.score_group(make_group(["a", "b", "c"])).samples]

    assert correctness_by("second") == [None, True, True]
    assert correctness_by("raises", on_error=1.0) == [None, None, None]


def test_a_set_has_its_own_terms(rule: str, make_group: MakeGroup) -> None:
    """Its weights take the place of the settings'; which of its answers are right follows from its own terms."""
    settings = RewardConfig(answer=1.0, boxed=0.5, functions={rule: 0.0})
    sets = {"math": {"answer": 2.0}, "form": {"boxed": 1.0, "repetition": 1.0}, "mine": {"rule": 3.0}}
    built = Scorer(settings, max_response_tokens=10, set_weights=sets)

    def score(name: str) -> tuple[list[float], list[bool | None], set[str]]:
        samples = built.score_group(make_group([r"\boxed{7}", r"\boxed{8}"], data_set=name)).samples
        correct = [sample.is_correct for sample in samples]
        return [sample.reward for sample in samples], correct, set(samples[0].reward_terms)

    assert score("math") == ([2.0, 0.0], [True, False], {"answer"})
    assert score("form") == ([1.0, 1.0], [None, None], {"boxed", "repetition"})
    assert score("mine") == ([4.5, 1.5], [None, None], {"rule"})
    assert score("other") == ([1.5, 0.5], [True, False], {"answer", "boxed", "rule"})
    built.close()
    built = Scorer(settings.model_copy(update={"correct": "answer"}), 10, set_weights=sets)
    assert score("form") == ([1.0, 1.0], [True, False], {"answer", "boxed", "repetition"})
    built.close()


def test_metrics_of_functions_are_averaged_once(scorer: Callable[..., Scorer], make_group: MakeGroup) -> None:
    built = scorer({"logs": 1.0})
    for step in (1, 2, 6):
        built.score_group(make_group(["a"]), step)
    assert built.take_stats().logged == {"mine": 3.0}
    assert built.take_stats() == RewardStats()


def test_reward_stats_of_ranks_add_up() -> None:
    first = RewardStats(unscored=2)
    second = RewardStats()
    for value in (1.0, 2.0):
        first.log("mine", value)
    second.log("mine", 6.0)
    first.failures["a"] += 1
    second.failures.update({"a": 2, "b": 1})
    first.first_errors["a"] = "first"
    second.first_errors["a"] = "second"
    merged = sum_stats([first, second])
    assert (merged.unscored, merged.failures) == (2, {"a": 3, "b": 1})
    assert (merged.logged, merged.first_errors) == ({"mine": 3.0}, {"a": "first"})


@pytest.mark.parametrize("function", ["raises", "infinite"])
def test_a_broken_reward_stops_with_the_sample_shown(
    function: str, scorer: Callable[..., Scorer], make_group: MakeGroup
) -> None:
    built = scorer({function: 1.0})
    with pytest.raises(UserError, match=rf"reward {function}: prompt 12: {FAILURES[function]}"):
        built.score_group(make_group(["a", "b", "c"]))


def test_a_sample_of_a_failing_reward_may_count_as_one_without(
    scorer: Callable[..., Scorer], make_group: MakeGroup
) -> None:
    built = scorer({"raises": 2.0, "answer": 1.0, "even": 1.0}, on_error="skip")
    scored = built.score_group(make_group(["a", "b"]))
    assert rewards(scored) == [0.0, 0.0]
    assert not any(sample.is_scored for sample in scored.samples)
    assert [sample.reward_terms for sample in scored.samples] == [{"answer": 3.0, "even": 2.0}, {"answer": 3.0}]
    assert (built.take_stats().unscored, built.take_stats().failures) == (2, {})


@pytest.mark.parametrize("function", FAILURES)
def test_a_broken_reward_scores_on_error_and_is_counted(
    function: str, scorer: Callable[..., Scorer], make_group: MakeGroup
) -> None:
    beside = {} if function == "hangs" else {"answer": 1.0}  # which has the same limit
    built = scorer({function: 2.0, **beside}, timeout_s=1.0 if function == "hangs" else 60.0, on_error=-0.5)
    scored = built.score_group(make_group(["a", "b", "c"]))
    assert rewards(scored) == [3.0 * len(beside) - 1.0] * 3
    assert scored.samples[0].reward_terms == {function: -0.5, **dict.fromkeys(beside, 3.0)}
    stats = built.take_stats()
    assert stats.failures == {function: 1}
    assert re.search(f"reward {function}: prompt 12: {FAILURES[function]}", stats.first_errors[function])


def test_a_prompt_without_answer_is_the_user_s_mistake(scorer: Callable[..., Scorer], make_group: MakeGroup) -> None:
    with pytest.raises(UserError, match=r"set data\.answer"):
        scorer(answer=1.0, on_error=0.0).score_group(make_group(["a"], answer=None))


def test_an_answer_that_cannot_be_compared_in_time_is_wrong(
    scorer: Callable[..., Scorer], make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = scorer(answer=1.0)
    hurry(built._built_in.verifier, monkeypatch)
    assert rewards(built.score_group(make_group([r"\boxed{9^{9^{9^{9}}}}", r"\boxed{\sqrt{49}}"]))) == [0.0, 1.0]
    assert built.take_stats().failures == {}


def test_threads_may_score_at_once(scorer: Callable[..., Scorer], make_group: MakeGroup) -> None:
    built = scorer({"waits": 1.0, "raises": 1.0}, answer=1.0, on_error=0.0)
    groups = [make_group([rf"\boxed{{x+{n}}}"], answer=f"{n}+x") for n in range(8)]
    scored: dict[int, float] = {}
    threads = [
        threading.Thread(target=lambda n=n: scored.update({n: built.score_group(groups[n]).samples[0].reward}))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scored == dict.fromkeys(range(8), 5.0)
    assert built.take_stats().failures == {"raises": 8}


def test_a_scorer_of_another_limit_shares_all_but_it_and_the_counts(
    scorer: Callable[..., Scorer], make_group: MakeGroup
) -> None:
    built = scorer({"never": 1.0, "answer": 1.0}, overlong={"weight": 1.0, "buffer_tokens": 8})
    other = built.for_evaluation(20)
    found = [one.score_group(make_group(["12345"])).samples[0].reward_terms["overlong"] for one in (built, other)]
    assert found == [-0.375, 0.0]
    assert other.term_weights == built.term_weights
    assert built.for_evaluation(10).score_group(make_group(["12345"])) == built.score_group(make_group(["12345"]))
