"""Language consistency: which share of a text's words is of the wanted scripts."""

import re
import unicodedata
from collections.abc import Collection, Iterator

# Languages by ISO 639-1 code, and the scripts of each: the first words of the Unicode names of its letters.
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
COMMAND = re.compile(r"\\[A-Za-z]+")  # of LaTeX
LETTERS = re.compile(r"[^\W\d_]+")
MODIFIER = "modifier"  # letters such as an apostrophe in a word: of the script of those before them
OF_CJK = "ideographic"  # signs that stand for a Chinese character: that before them again, or zero


def check_language(code: object) -> str:
    """Return the code. Raises ValueError where it is none, or its script is not known."""
    if not isinstance(code, str) or code not in LANGUAGES:
        raise ValueError(f"{code!r:.40} is no known language: {', '.join(sorted(LANGUAGES))}")
    return code


def script_share(text: str, scripts: Collection[str]) -> float:
    """Return the share of a text's words that are of these SCRIPTS; 1 where it has no words.

    R1's language consistency (arXiv 2501.12948, section 2.3.2), by the script in place of the language. LaTeX's
    commands and single Latin or Greek letters, which are variables, do not count.
    """
    words = list(_scripts_of_words(text))
    return sum(script in scripts for script in words) / len(words) if words else 1.0


def _scripts_of_words(text: str) -> Iterator[str]:
    """Yield the script of each word; a run of letters is divided where its script changes."""
    plain = unicodedata.normalize("NFKC", COMMAND.sub(" ", text))
    letters = "".join(letter for letter in plain if unicodedata.category(letter)[0] != "M")  # without accents, signs
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
    if script and script not in WITHOUT_BLANKS and not (length == 1 and script in ("latin", "greek")):
        yield script


def _script(letter: str) -> str:
    script = unicodedata.name(letter, "").partition(" ")[0].partition("-")[0].lower()
    return "cjk" if script == OF_CJK else script
