"""Seeded arithmetic word problems in GSM8K's format: a task that a tiny policy can learn and no model has memorized."""

import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import write_atomically

NAMES = ("Tom", "Ann", "Sam", "Mia", "Ben", "Eva")
OBJECTS = ("apples", "books", "coins", "pens", "eggs", "cards")
TEMPLATES = {
    "add": (
        "{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have?",
        "{name} has {a} {thing} and {other} has {b}. How many {thing} do they have?",
        "{other} gives {name} {a} {thing} and then {b} more. How many does {name} get?",
    ),
    "subtract": (
        "{name} has {a} {thing} and gives {b} to {other}. How many {thing} are left?",
        "{name} had {a} {thing} and lost {b}. How many {thing} are left?",
        "{name} has {a} {thing} and {other} has {b}. How many more does {name} have?",
    ),
    "two_steps": (
        "{name} has {a} {thing}, buys {b} and gives {c} to {other}. How many are left?",
        "{name} had {a} {thing}, got {b} more and lost {c}. How many does {name} have?",
    ),
}
SMALLEST_OPERAND = 2
MOST_DRAWS_IN_VAIN = 100_000  # consecutive draws without a new problem until the operands count as used up


@dataclass(frozen=True)
class Slip:
    """An error in a worked answer: the result of column `step` (from 0, the rightmost) is off by `by`."""

    step: int
    by: int


@dataclass(frozen=True)
class Problem:
    """A question. Its kind and operands determine the worked answer."""

    question: str
    kind: str
    operands: tuple[int, ...]

    @property
    def result(self) -> int:
        """Return the number that answers the question."""
        return solve(self.kind, self.operands)[1]

    @property
    def answer(self) -> str:
        """Return the answer in GSM8K's format: the working, then the result after '####'."""
        working, result = solve(self.kind, self.operands)
        return f"{working}\n#### {result}"

    @property
    def row(self) -> dict[str, Any]:
        """Return the data row."""
        return {"question": self.question, "answer": self.answer}


def make_problems(
    count_train: int, count_eval: int, seed: int, largest: int, kinds: tuple[str, ...] = ("add", "subtract")
) -> tuple[list[Problem], list[Problem]]:
    """Make train and eval problems with different questions and operands 2 .. `largest`.

    `kinds`: keys of TEMPLATES. A set of operands, in any order, belongs to only one split. Raises UserError
    for an unknown kind, or if the operands do not allow so many problems.
    """
    if unknown := set(kinds) - set(TEMPLATES):
        raise UserError(f"unknown kind of problem {sorted(unknown)}: choose from {', '.join(TEMPLATES)}")
    if largest < SMALLEST_OPERAND:
        raise UserError(f"operands begin at {SMALLEST_OPERAND}: the largest cannot be {largest}")
    held_out = max(0.1, count_eval / max(1, count_train + count_eval)) if count_eval else 0.0
    counts = {"train": count_train, "eval": count_eval}
    problems_of: dict[str, dict[str, Problem]] = {"train": {}, "eval": {}}
    rng = random.Random(seed)
    in_vain = 0
    while in_vain < MOST_DRAWS_IN_VAIN and any(len(problems_of[split]) < counts[split] for split in counts):
        problem = _draw_problem(rng, largest, kinds)
        split = _split_of(problem.operands, seed, held_out)
        is_new = len(problems_of[split]) < counts[split] and problem.question not in problems_of[split]
        in_vain = 0 if is_new else in_vain + 1
        if is_new:
            problems_of[split][problem.question] = problem
    for split, split_problems in problems_of.items():
        if len(split_problems) < counts[split]:
            raise UserError(
                f"operands up to {largest} gave only {len(split_problems)} of {counts[split]} {split} problems: "
                "ask for fewer or raise the largest operand"
            )
    return list(problems_of["train"].values()), list(problems_of["eval"].values())


def worked_response(problem: Problem, slip: Slip | None = None) -> str:
    r"""Return the response of a supervised example: '8+4=12 1+3+1=5 \boxed{52}'; with `slip`, a wrong response."""
    working, result = solve(problem.kind, problem.operands, slip)
    return f"{working} \\boxed{{{result}}}"


def draw_slip(rng: random.Random, share: float) -> Slip | None:
    """Return a random slip with probability `share`, else None."""
    if rng.random() >= share:
        return None
    return Slip(rng.randrange(2), rng.choice((-2, -1, 1, 2)))


def solve(kind: str, operands: tuple[int, ...], slip: Slip | None = None) -> tuple[str, int]:
    """Return the working, column by column, and the result that follows from it."""
    a, b = operands[:2]
    if kind == "add":
        return add_columns(a, b, slip)
    if kind == "subtract":
        return subtract_columns(a, b, slip)
    first, total = add_columns(a, b)
    second, result = subtract_columns(total, operands[2], slip)
    return f"{first} {second}", result


class HasRow(Protocol):
    """A problem of a task."""

    @property
    def row(self) -> dict[str, Any]:
        """Return the data row."""


def write_jsonl(problems: Iterable[HasRow], path: Path) -> None:
    """Write each problem as a line of JSON, atomically."""
    write_rows((problem.row for problem in problems), path)


def write_rows(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write each row as a line of JSON, atomically."""
    write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def vocabulary_words() -> tuple[str, ...]:
    """Return all words that occur in questions, sorted. The tokenizer has a token for each word."""
    texts = [re.sub(r"\{\w+\}", "", text) for group in TEMPLATES.values() for text in group]
    return tuple(sorted({word for text in (*texts, *NAMES, *OBJECTS) for word in re.findall(r"[A-Za-z]+", text)}))


def add_columns(a: int, b: int, slip: Slip | None = None) -> tuple[str, int]:
    """Add digit by digit from the right, with carries; return working and result: '8+4=12 1+3+1=5', 52 for 18 + 34."""
    steps = []
    carry = 0
    result = 0
    for place, (x, y) in enumerate(_digit_pairs(a, b)):
        total = min(19, abs(x + y + carry + _slip_offset(slip, place)))  # a column sum is at most 19: 9 + 9 + 1
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry, digit = divmod(total, 10)
        result += digit * 10**place
    return " ".join(steps), result + carry * 10 ** len(steps)


def subtract_columns(a: int, b: int, slip: Slip | None = None) -> tuple[str, int]:
    """Subtract b <= a digit by digit from the right; return working and result: '12-8=4 5-1-1=3', 34 for 52 - 18."""
    steps = []
    borrowed = 0
    result = 0
    for place, (x, y) in enumerate(_digit_pairs(a, b)):
        ten = 10 if x - y - borrowed < 0 else 0
        digit = (x + ten - y - borrowed + _slip_offset(slip, place)) % 10
        steps.append(f"{x + ten}-{y}{'-1' if borrowed else ''}={digit}")
        borrowed = ten // 10
        result += digit * 10**place
    return " ".join(steps), result


def _slip_offset(slip: Slip | None, place: int) -> int:
    return slip.by if slip and slip.step == place else 0


def _digit_pairs(a: int, b: int) -> Iterator[tuple[int, int]]:
    for place in range(len(str(max(a, b)))):
        yield a // 10**place % 10, b // 10**place % 10


def _draw_problem(rng: random.Random, largest: int, kinds: tuple[str, ...]) -> Problem:
    kind = rng.choice(kinds)
    name, other = rng.sample(NAMES, 2)
    a, b, c = (rng.randint(SMALLEST_OPERAND, largest) for _ in range(3))
    if kind == "two_steps":
        c = rng.randint(SMALLEST_OPERAND, min(largest, a + b))
    if kind == "subtract":
        a, b = max(a, b), min(a, b)
    operands = (a, b, c) if kind == "two_steps" else (a, b)
    template = rng.choice(TEMPLATES[kind])
    question = template.format(name=name, other=other, thing=rng.choice(OBJECTS), a=a, b=b, c=c)
    return Problem(question, kind, operands)


def _split_of(operands: tuple[int, ...], seed: int, held_out: float) -> str:
    """Return the split of a set of operands, in any order. It depends only on seed and operands.

    `held_out`: share of the sets that belong to eval.
    """
    digest = hashlib.blake2b(f"{seed} {sorted(operands)}".encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "big") < held_out * 2**64 else "train"
