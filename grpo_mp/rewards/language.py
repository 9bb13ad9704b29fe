"""Language consistency: the share of a text's words that are in the script of the target language."""

import re
import unicodedata
from collections.abc import Collection
from itertools import groupby

# ISO 639-1 code -> scripts of the language. A script is the first word of its letters' Unicode names, in lower case.
LANGUAGES: dict[str, tuple[str, ...]] = {
    code: tuple(scripts.split())
    for scripts, codes in {
        "latin": "cs da de en es fi fr hr hu id it ms nl no pl pt ro sk sl sv sw tr vi",
        "cyrillic": "be bg kk mk ru uk",
        "arabic": "ar fa ur",
        "devanagari": "hi mr ne",
        "cjk": "zh",
        "cjk hiragana katakana": "ja",
        "hangul": "ko",
        "greek": "el",
        "hebrew": "he",
        "bengali": "bn",
        "tamil": "ta",
        "telugu": "te",
        "thai": "th",
        "georgian": "ka",
        "armenian": "hy",
    }.items()
    for code in codes.split()
}
WITHOUT_BLANKS = frozenset({"cjk", "hiragana", "katakana", "thai"})  # each letter counts as a word
COMMAND = re.compile(r"\\[A-Za-z]+")  # LaTeX commands
LETTERS = re.compile(r"[^\W\d_]+")
MODIFIER = "modifier"  # letters such as an apostrophe: they belong to the script of the letters before them


def check_language(code: object) -> str:
    """Return `code`; raise ValueError if it is not a known language code."""
    if not isinstance(code, str) or code not in LANGUAGES:
        raise ValueError(f"{code!r:.40} is no known language: {', '.join(sorted(LANGUAGES))}")
    return code


def script_share(text: str, scripts: Collection[str]) -> float:
    """Return the share of a text's words that are in the given scripts; 1 for a text without words.

    Language consistency of DeepSeek-R1 (arXiv 2501.12948, section 2.3.2), by script instead of language. LaTeX commands
    and single Latin or Greek letters, which are variables, do not count as words.
    """
    plain = unicodedata.normalize("NFKC", COMMAND.sub(" ", text))
    plain = "".join(letter for letter in plain if unicodedata.category(letter)[0] != "M")  # without combining marks
    words = list[str]()
    for run in LETTERS.findall(plain):
        # A change of script inside a run of letters starts a new word.
        for script, letters in groupby(found for letter in run if (found := _script(letter)) != MODIFIER):
            count = len(list(letters))
            if script in WITHOUT_BLANKS:
                words += [script] * count
            elif count > 1 or script not in ("latin", "greek"):
                words.append(script)
    return sum(script in scripts for script in words) / len(words) if words else 1.0


def _script(letter: str) -> str:
    script = unicodedata.name(letter, "").partition(" ")[0].partition("-")[0].lower()
    return "cjk" if script == "ideographic" else script  # the iteration mark and the zero
