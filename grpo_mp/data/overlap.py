"""How many held-out problems stand in the train data too. Pure."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

RUN_WORDS = 13  # that two texts share; GPT-3 (arXiv 2005.14165, appendix C)
# Numbers, words, and signs that make another problem of the same numbers. A hyphen between words is no sign.
WORD = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d]+|[+*/=<>^%]|(?<![^\W\d]{2})-|-(?![^\W\d]{2})")


@dataclass(frozen=True)
class Overlap:
    """Of one eval set: problems with the words of a train problem, and others that share a long run of words."""

    name: str
    problems: int
    same: int
    near: int

    @property
    def sentence(self) -> str:
        """For people."""
        share = "shares" if self.near == 1 else "share"
        alike = f"; {self.near} more {share} {RUN_WORDS} words in a row with one" if self.near else ""
        of = f"{self.same} of {self.problems}" if self.same else f"none of {self.problems}"
        stand = "stands" if self.same in (0, 1) else "stand"
        return f"data.eval {self.name}: {of} problems {stand} in data.train too{alike}"


def find_overlaps(train: Iterable[str], evals: Mapping[str, Iterable[str]]) -> list[Overlap]:
    """Compare texts by their words: case, blanks and punctuation do not count. Memory is that of the eval sets."""
    words = {name: [split_words(text) for text in texts] for name, texts in evals.items()}
    wanted = {one for texts in words.values() for one in texts}
    wanted_runs = {run for one in wanted for run in _runs(one)}
    same, runs = set[tuple[str, ...]](), set[tuple[str, ...]]()
    for one in map(split_words, train):
        if one in wanted:
            same.add(one)
        runs.update(run for run in _runs(one) if run in wanted_runs)
    return [
        Overlap(
            name=name,
            problems=len(texts),
            same=sum(one in same for one in texts),
            near=sum(one not in same and any(run in runs for run in _runs(one)) for one in texts),
        )
        for name, texts in words.items()
    ]


def split_words(text: str) -> tuple[str, ...]:
    """'How many  (3.5)?' -> how, many, 3.5."""
    return tuple(WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def _runs(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (words[start : start + RUN_WORDS] for start in range(len(words) - RUN_WORDS + 1))
