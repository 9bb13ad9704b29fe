"""Language consistency: the share of a text's words that are in the script of the target language."""

import re
import unicodedata
from collections.abc import Collection, Iterator

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
SCRIPTS = tuple(dict.fromkeys(script for scripts in LANGUAGES.values() for script in scripts))
WITHOUT_BLANKS = frozenset({"cjk", "hiragana", "katakana", "thai"})  # each letter counts as a word
COMMAND = re.compile(r"\\[A-Za-z]+")  # LaTeX commands
LETTERS = re.compile(r"[^\W\d_]+")
MODIFIER = "modifier"  # letters such as an apostrophe: they belong to the script of the letters before them
OF_CJK = "ideographic"  # the iteration mark and the zero, which count as Chinese characters


def check_language(code: object) -> str:
    """Return `code`; raise ValueError if it is not a known language code."""
    if not isinstance(code, str) or code not in LANGUAGES:
        raise ValueError(f"{code!r:.40} is no known language: {', '.join(sorted(LANGUAGES))}")
    return code


def script_share(text: str, scripts: Collection[str]) -> float:
    """Return the share of a text's words that are in the given SCRIPTS; 1 for a text without words.

    Language consistency of DeepSeek-R1 (arXiv 2501.12948, section 2.3.2), by script instead of language. LaTeX commands
    and single Latin or Greek letters, which are variables, do not count as words.
    """
    words = list(_scripts_of_words(text))
    return sum(script in scripts for script in words) / len(words) if words else 1.0


def _scripts_of_words(text: str) -> Iterator[str]:
    """Yield the script of each word; a change of script inside a run of letters starts a new word."""
    plain = unicodedata.normalize("NFKC", COMMAND.sub(" ", text))
    letters = "".join(letter for letter in plain if unicodedata.category(letter)[0] != "M")  # without combining marks
    for run in LETTERS.findall(letters):
        script, length = "", 0
        for letter in run:
            found = _script(letter)
            if found == MODIFIER:
                continue
            if found in WITHOUT_BLANKS:
                yield found
            if found != script:
                yield from _word(script, length)
                script, length = found, 0
            length += 1
        yield from _word(script, length)


def _word(script: str, length: int) -> Iterator[str]:
    """Yield the script of a word, unless its letters count as words themselves or it is a single variable."""
    if script and script not in WITHOUT_BLANKS and not (length == 1 and script in ("latin", "greek")):
        yield script


def _script(letter: str) -> str:
    script = unicodedata.name(letter, "").partition(" ")[0].partition("-")[0].lower()
    return "cjk" if script == OF_CJK else script
