"""The share of a text's words that are of a script."""

import pytest

from grpo_mp.rewards.language import script_share

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
