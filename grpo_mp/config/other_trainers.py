"""Translation of settings of TRL, verl and slime, for configs/COMING_FROM.md and messages about unknown settings."""

import re
from collections.abc import Mapping
from functools import cache
from itertools import chain
from pathlib import Path

import yaml

TRAINERS = ("TRL", "verl", "slime")
CODE = re.compile(r"`([^`]+)`")
NAMES_ONLY = re.compile(r"`[^`]+`(, `[^`]+`)*")  # cells of names only, without a formula or a remark

Row = Mapping[str, str]  # Markdown by column: `here`, and the trainers that have the setting


@cache
def read_tables() -> Mapping[str, tuple[Row, ...]]:
    """Read other_trainers.yaml: rows by title of their table."""
    text = Path(__file__).with_name("other_trainers.yaml").read_text(encoding="utf-8")
    return {title: tuple(rows) for title, rows in yaml.safe_load(text).items()}


def translate(name: str) -> str:
    """Return "TRL's num_generations is rollout.group_size here" for a setting of another trainer, else "".

    `name`: as the user wrote it, perhaps with verl's prefix actor_rollout_ref, or below a section of this program
    (`rollout.num_generations`).
    """
    name = name.removeprefix("actor_rollout_ref.")
    for known in (name, name.rpartition(".")[2]):
        if known in _translations():
            return _translations()[known]
    return ""


@cache
def _translations() -> Mapping[str, str]:
    """Return sentences by full name of a trainer's setting, and by the last part of a dotted name if it is distinctive.

    Rows that consist of names only take precedence over those with formulas or remarks.
    """
    sentences: dict[str, str] = {}
    rows = [row for table in read_tables().values() for row in table]
    exact = [(row, trainer) for row in rows for trainer in TRAINERS if NAMES_ONLY.fullmatch(row.get(trainer, ""))]
    rest = [(row, trainer) for row in rows for trainer in TRAINERS if trainer in row and (row, trainer) not in exact]
    for row, trainer in chain(exact, rest):
        names = CODE.findall(row[trainer])
        here = CODE.findall(row["here"]) or [row["here"]]
        matching = here if len(here) == len(names) else [" and ".join(here)] * len(names)
        for name, setting in zip(names, matching, strict=True):
            sentence = f"{trainer}'s {name} is {setting} here"
            key = name.removeprefix("--").replace("-", "_")
            if key == setting:
                continue
            sentences.setdefault(key, sentence)
            leaf = key.rpartition(".")[2]
            if "_" in leaf:  # a single word, such as `path`, is ambiguous
                sentences.setdefault(leaf, sentence)
    return sentences
