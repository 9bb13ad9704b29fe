"""The settings of TRL, verl and slime and what they are here: a table that a page shows and errors look up."""

import re
from collections.abc import Mapping
from functools import cache
from itertools import chain
from pathlib import Path

import yaml

TRAINERS = ("TRL", "verl", "slime")
CODE = re.compile(r"`([^`]+)`")
NAMES_ONLY = re.compile(r"`[^`]+`(, `[^`]+`)*")  # a formula or a remark is not the same setting

Row = Mapping[str, str]  # cells in Markdown: `here`, and one for each trainer that has the setting


@cache
def read_tables() -> Mapping[str, tuple[Row, ...]]:
    """Read the rows of other_trainers.yaml by the title of their table."""
    text = Path(__file__).with_name("other_trainers.yaml").read_text(encoding="utf-8")
    return {title: tuple(rows) for title, rows in yaml.safe_load(text).items()}


def translate(name: str) -> str:
    """Return "TRL's num_generations is rollout.group_size here" for another trainer's setting, "" for any other name.

    `name`: as a user wrote it: with verl's prefix actor_rollout_ref, or below a section of this program
    (`rollout.num_generations`).
    """
    name = name.removeprefix("actor_rollout_ref.")
    for known in (name, name.rpartition(".")[2]):
        if known in _translations():
            return _translations()[known]
    return ""


@cache
def _translations() -> Mapping[str, str]:
    """Index sentences by each trainer's name, and by the last part of verl's names that have several words."""
    sentences: dict[str, str] = {}
    rows = [row for table in read_tables().values() for row in table]
    exact = [(row, trainer) for row in rows for trainer in TRAINERS if NAMES_ONLY.fullmatch(row.get(trainer, ""))]
    rest = [(row, trainer) for row in rows for trainer in TRAINERS if trainer in row and (row, trainer) not in exact]
    for row, trainer in chain(exact, rest):
        names, here = CODE.findall(row[trainer]), CODE.findall(row["here"]) or [row["here"]]
        matching = here if len(here) == len(names) else [" and ".join(here)] * len(names)
        for name, setting in zip(names, matching, strict=True):
            sentence = f"{trainer}'s {name} is {setting} here"
            key = name.removeprefix("--").replace("-", "_")
            if key == setting:
                continue
            sentences.setdefault(key, sentence)
            leaf = key.rpartition(".")[2]
            if "_" in leaf:  # a single word, such as `path`, may mean anything
                sentences.setdefault(leaf, sentence)
    return sentences
