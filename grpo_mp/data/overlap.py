"""Count eval problems that are in the train data too (contamination). Pure."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

NGRAM_WORDS = 13  # that near duplicates share; GPT-3 (arXiv 2005.14165, appendix C)
# Numbers, words, and signs that make another problem of the same numbers. A hyphen between words is no sign.
TOKEN = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d]+|[+*/=<>^%]|(?<![^\W\d]{2})-|-(?![^\W\d]{2})")


@dataclass(frozen=True)
class Overlap:
    """Problems of one eval set that equal a train problem word by word, and others that share a long run of words."""

    name: str
    problems: int
    exact: int
    near: int

    @property
    def sentence(self) -> str:
        """Return the line that a run prints."""
        near = f"; {self.near} more with {NGRAM_WORDS} consecutive words of a train problem" if self.near else ""
        return f"data.eval {self.name}: {self.exact} of {self.problems} problems are also in data.train{near}"


def find_overlaps(train: Iterable[str], evals: Mapping[str, Iterable[str]]) -> list[Overlap]:
    """Compare texts by their words: case, blanks and punctuation do not count. Memory is that of the eval sets."""
    problems_by_set = {name: [split_words(text) for text in problems] for name, problems in evals.items()}
    eval_problems = {problem for problems in problems_by_set.values() for problem in problems}
    eval_ngrams = {ngram for problem in eval_problems for ngram in _ngrams(problem)}
    exact, train_ngrams = set[tuple[str, ...]](), set[tuple[str, ...]]()
    for problem in map(split_words, train):
        if problem in eval_problems:
            exact.add(problem)
        train_ngrams.update(ngram for ngram in _ngrams(problem) if ngram in eval_ngrams)
    return [
        Overlap(
            name=name,
            problems=len(problems),
            exact=sum(problem in exact for problem in problems),
            near=sum(problem not in exact and not train_ngrams.isdisjoint(_ngrams(problem)) for problem in problems),
        )
        for name, problems in problems_by_set.items()
    ]


def split_words(text: str) -> tuple[str, ...]:
    """Split a text into lower-case words and signs: 'How many  (3.5)?' -> how, many, 3.5."""
    return tuple(TOKEN.findall(unicodedata.normalize("NFKC", text).casefold()))


def _ngrams(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (words[start : start + NGRAM_WORDS] for start in range(len(words) - NGRAM_WORDS + 1))
