from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from trl.rewards import think_format_reward

from grpo_mp.rewards.language import script_share
from grpo_mp.rewards.scorer import Scorer
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.rewards.terms import overlong_penalty, repetition_penalty, think_format
from grpo_mp.utils.types import SampleGroup


@given(st.integers(0, 300), st.integers(2, 200), st.data())
def test_overlong_is_equation_13_of_dapo(length: int, l_max: int, data: st.DataObject) -> None:
    l_cache = data.draw(st.integers(1, l_max - 1))
    if length <= l_max - l_cache:
        expected = 0.0
    elif length <= l_max:
        expected = ((l_max - l_cache) - length) / l_cache
    else:
        expected = -1.0
    assert overlong_penalty(length, l_max, l_cache) == expected


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_repetition_counts_what_stood_before(tokens: list[int], ngram: int) -> None:
    grams = [tokens[i : i + ngram] for i in range(max(0, len(tokens) - ngram + 1))]
    num_repeated = sum(grams[i] in grams[:i] for i in range(len(grams)))
    # A quotient and a difference, each at most 1 and rounded by 2^-53 of itself.
    exact = Fraction(-num_repeated, len(grams)) if grams else Fraction(0)
    assert abs(Fraction(repetition_penalty(tokens, ngram)) - exact) <= Fraction(2, 2**53)


@pytest.mark.parametrize("tokens", [15, 20, 24, 30, 31])
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("high", [1.0, 3.0])
def test_overlong_weighs_as_in_dapo_whatever_the_range_of_the_reward(
    tokens: int, right: bool, high: float, make_group: Callable[..., SampleGroup]
) -> None:
    """DAPO scores -1 and 1 and takes eq. 13 off; on another range the whole is that, moved and stretched to it."""
    published = (1.0 if right else -1.0) + min(0.0, max(-1.0, (20 - tokens) / 10))
    overlong = {"overlong": {"weight": 1.0, "buffer_tokens": 10}}
    scorer = Scorer(RewardConfig.model_validate({"answer": high} | overlong), max_response_tokens=30)
    try:
        (sample,) = scorer.score_group(make_group([("\\boxed{7}" if right else "none").ljust(tokens)])).samples
    finally:
        scorer.close()
    assert sample.reward == pytest.approx((published + 1) / 2 * high)


TAGS = ("<think>", "</think>")
THOUGHTS = [
    ("<think>3 and 4</think>7", 1.0, 1.0),
    ("<think>\nlong\n</think>\n\n7\n", 1.0, 1.0),
    ("3 and 4</think>7", 0.0, 0.0),
    ("<think>3 and 4", 0.0, 0.0),
    ("So <think>3</think>7", 0.0, 0.0),
    ("<think>a</think>7<think>b</think>", 0.0, 0.0),
    # TRL takes these: no thinking, no answer, or a second end of the thinking.
    ("<think> </think>7", 0.0, 1.0),
    ("<think>3 and 4</think> \n", 0.0, 1.0),
    ("<think>a</think>7</think>8", 0.0, 1.0),
]


@pytest.mark.parametrize(("text", "value", "of_trl"), THOUGHTS)
def test_think_format_beside_trl(text: str, value: float, of_trl: float) -> None:
    assert think_format(text, TAGS) == value
    assert think_format_reward([[{"content": text}]]) == [of_trl]
    if text.startswith("<think>"):  # the chat template has written the tag
        assert think_format(text.removeprefix("<think>"), TAGS, opened=True) == value
        assert think_format(text, TAGS, opened=True) == 0.0


def score_texts(reward: dict[str, Any], group: SampleGroup) -> list[float]:
    scorer = Scorer(RewardConfig.model_validate(reward), max_response_tokens=30)
    try:
        return [sample.reward for sample in scorer.score_group(group).samples]
    finally:
        scorer.close()


def test_the_format_is_a_term_of_the_reward(make_group: Callable[..., SampleGroup]) -> None:
    group = make_group(["<think>a</think>7", "7", "<t>a</t>7"])
    assert score_texts({"think": {"weight": 0.5}}, group) == [0.5, 0.0, 0.0]


def test_language_consistency_is_the_share_of_the_words_of_the_thinking(make_group: Callable[..., SampleGroup]) -> None:
    """Not of the answer; where the thinking does not end, of all words."""
    texts = ["<think>we have 我们</think>答案是七", "我们 have 7", "<think>\\frac{x}{2}</think>七"]
    assert score_texts({"language": {"weight": 1}}, make_group(texts)) == pytest.approx([2 / 4, 1 / 3, 1.0])
    chinese = score_texts({"language": {"weight": 1, "target": "zh"}}, make_group(texts))
    assert chinese == pytest.approx([2 / 4, 2 / 3, 1.0])
    by_row = {"language": {"weight": 2, "column": "lang"}, "on_error": -1.0}
    assert score_texts(by_row, make_group(texts[:1], lang="zh")) == [1.0]
    for unknown in ("klingon", ["zh"], None):
        assert score_texts(by_row, make_group(texts[:1], lang=unknown)) == [-2.0]
    with pytest.raises(ValidationError, match="'klingon' is no known language: ar, be,"):
        RewardConfig.model_validate({"language": {"weight": 1, "target": "klingon"}})


CASES = [
    ("", ["latin"], 1.0),
    ("two and два", ["latin"], 2 / 3),
    ("two and два", ["latin", "cyrillic"], 1.0),
    ("我们 have 答案", ["cjk"], 4 / 5),  # each character counts as a word
    ("ひらがな カタカナ 漢字", ["hiragana", "katakana", "cjk"], 1.0),
    ("ﾊﾝｶｸ", ["katakana"], 1.0),  # half-width
    ("答案是 \\boxed{\\frac{x}{2}}", ["cjk"], 1.0),  # commands and variables are of no language
    ("naïve café", ["latin"], 1.0),
    ("नमस्ते दुनिया", ["devanagari"], 1.0),
    ("人々は時々図書館に行く", ["cjk", "hiragana"], 1.0),  # signs for a character that is repeated
    ("dʼArtagnan and ʻokina", ["latin"], 1.0),  # apostrophes that are letters
]


@pytest.mark.parametrize(("text", "scripts", "share"), CASES)
def test_share_of_the_words(text: str, scripts: list[str], share: float) -> None:
    assert script_share(text, scripts) == pytest.approx(share)
