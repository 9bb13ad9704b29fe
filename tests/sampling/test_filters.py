"""Which answers each filter keeps, against the definition written out, for every group of small ones."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.config import check_settings
from grpo_mp.trainer.sampling.filters import apply_filters, load_sample_filters
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Sample
from tests.minimal_settings import MINIMAL_SETTINGS
from tests.sampling.groups import answer, group_of

REWARDS = (0.0, 0.5, 1.0)
LENGTHS = (1, 2, 3)


def kept(samples: Sequence[Sample], *filters: Any, **more: Any) -> list[int]:
    """Indices of what the filters of the settings keep."""
    tree = MINIMAL_SETTINGS | {"sample": {"filters": list(filters)}}
    settings = check_settings(tree, "test.yaml")
    loaded = load_sample_filters(settings.sample.filters, **{"group_size": 4, "knows_correct": True} | more)
    return [sample.index for sample in apply_filters(group_of(*samples), loaded, Counter())]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_best_are_those_that_fewer_than_k_are_better_than(k: int) -> None:
    def is_better(one: Sample, other: Sample) -> bool:
        if one.reward != other.reward:
            return one.reward > other.reward
        if len(one.tokens) != len(other.tokens):
            return len(one.tokens) < len(other.tokens)
        return one.index < other.index

    for kinds in product(product(REWARDS[:2], LENGTHS[:2]), repeat=4):
        samples = [answer(index, length, reward=reward) for index, (reward, length) in enumerate(kinds)]
        expected = [s.index for s in samples if sum(is_better(other, s) for other in samples) < k]
        assert kept(samples, {"best": {"k": k}}) == expected


def test_what_was_not_scored_is_not_among_the_best() -> None:
    """Its reward is the mean of the others, for advantages."""
    samples = [answer(0, reward=0.0), answer(1, reward=0.5, is_scored=False), answer(2, reward=1.0)]
    assert kept(samples, {"best": {"k": 2}}) == [0, 2]
    assert kept(samples, {"best": {"k": 3}}) == [0, 2]


def test_an_episode_is_as_long_as_all_its_sequences() -> None:
    samples = [answer(0, 2, earlier=(answer(0, 7, generated=(True,) * 6 + (False,)),)), answer(1, 3)]
    assert kept(samples, {"tokens": {"max": 7}}) == [1]
    assert kept(samples, {"tokens": {"min": 8}}) == [0]
    assert kept(samples, {"best": {"k": 1}}) == [1]


def test_right_are_those_that_are_judged_right() -> None:
    for verdicts in product((True, False, None), repeat=3):
        samples = [answer(index, is_correct=verdict) for index, verdict in enumerate(verdicts)]
        assert kept(samples, "right") == [index for index, verdict in enumerate(verdicts) if verdict]


def test_complete_is_what_ended_by_itself() -> None:
    states = (None, "completed", "truncated", "timeout", "error")
    kinds = list(product(states, (False, True)))
    samples = [answer(index, state=state, truncated=cut) for index, (state, cut) in enumerate(kinds)]
    assert [kinds[index] for index in kept(samples, "complete")] == [(None, False), ("completed", False)]


TEXTS = ("a b", " a\n b ", "a  b\t", "ab", "a b c", "")


def test_distinct_are_those_without_an_equal_one_before_them() -> None:
    for texts in product(TEXTS, repeat=3):
        samples = [answer(index, text=text) for index, text in enumerate(texts)]
        words = [re.findall(r"\S+", text) for text in texts]
        assert kept(samples, "distinct") == [index for index, own in enumerate(words) if own not in words[:index]]


def test_episodes_are_distinct_where_any_of_their_messages_is() -> None:
    def episode(index: int, called: str, said: str) -> Sample:
        messages = ({"role": "assistant", "content": "", "tool_calls": called}, {"role": "assistant", "content": said})
        return answer(index, text=said, state="completed", messages=messages)

    samples = [episode(0, "f(1)", "2"), episode(1, "f(2)", "2"), episode(2, "f(1)", "2\n"), episode(3, "f(1)", "3")]
    assert kept(samples, "distinct") == [0, 1, 3]


def test_counts_are_what_each_filter_dropped_of_what_the_others_left() -> None:
    samples = [answer(index, reward=index / 4, is_correct=index > 0, text=str(index // 2)) for index in range(4)]
    filters = load_sample_filters({"right": {}, "distinct": {}, "best": {"k": 1}}, 4, True)
    dropped = Counter[str]()
    assert [sample.index for sample in apply_filters(group_of(*samples), filters, dropped)] == [2]
    assert dropped == {"right": 1, "distinct": 1, "best": 1}


OWN = """
def odd(prompt, samples): return [s.index % 2 == 1 for s in samples]
def fails(prompt, samples): raise KeyError("level")
def short(prompt, samples): return [True]
class AtLeast:
    def __init__(self, tokens): self.tokens = tokens
    def __call__(self, prompt, samples): return [len(s.tokens) >= self.tokens for s in samples]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)


@pytest.mark.usefixtures("own")
def test_own_functions_and_classes_are_filters() -> None:
    samples = [answer(index, index + 1) for index in range(4)]
    assert kept(samples, "own.py:odd") == [1, 3]
    assert kept(samples, "own.py:odd", {"own.py:AtLeast": {"tokens": 3}}) == [3]


REFUSED = {
    "rihgt": r"unknown filter of samples 'rihgt' \(did you mean right\?\): there are right, best",
    "own.py:fails": r"sample.filters.own.py:fails: prompt 3: it failed: KeyError: 'level'",
    "own.py:short": r"prompt 3: it returned \[True\]: return true or false for each of the 2",
}
WRONG_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"best": {"k": 0}}, "sample.filters.best: k: Input should be greater than 0"),
    ({"best": {"k": 5}}, "sample.filters.best: the best k=5 of 4 answers to a prompt are all: lower k, or raise --s"),
]


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_filter_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=REFUSED[name]):
        kept([answer(0), answer(1)], name)


@pytest.mark.parametrize(("named", "sentence"), WRONG_ARGUMENTS)
def test_arguments_are_checked_at_the_start(named: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=f"^{sentence}"):
        kept([], named)


@pytest.mark.parametrize("filters", [["right", "right"], {"right": 1}])
def test_filters_are_a_list_or_a_mapping(filters: Any) -> None:
    with pytest.raises(UserError, match=r"test.yaml: sample.filters"):
        check_settings(MINIMAL_SETTINGS | {"sample": {"filters": filters}}, "test.yaml")
