"""Choose the answers of a run that are worth reading, with what engine and policy say of their tokens."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import starmap

from grpo_mp.monitor.run_folder import Line, RunRecords
from grpo_mp.monitor.samples import evenly_spaced
from grpo_mp.utils.files import encodable

CHARACTERS = 4000  # of a text: its first and last half
STEPS = 4  # at which answers are shown
QUESTIONS, TIMES = 2, 6  # the same questions, and how often each is shown
LIMITS: Mapping[str, tuple[float, ...]] = {  # of the classes 0 to 4 of a token, ascending
    "probability": (0.01, 0.1, 0.5, 0.9),
    "mismatch": (0.01, 0.05, 0.2, 1.0),
    "advantage": (-1.0, -1e-6, 1e-6, 1.0),
}


@dataclass(frozen=True)
class Token:
    """A token of an answer, with its logprobs and its advantage; None where unknown."""

    text: str
    engine: float
    policy: float | None
    advantage: float | None

    @property
    def mismatch(self) -> float | None:
        """Return the absolute difference of both logprobs in nats; None where one is unknown or not finite."""
        if self.policy is None or math.isnan(self.engine):
            return None
        return abs(self.policy - self.engine)

    @property
    def classes(self) -> str:
        """Return the token's classes on the page: p0 to p4 by probability, m by mismatch, a by advantage."""
        probability = math.exp(min(self.engine, 0.0))
        values = {"probability": probability, "advantage": self.advantage, "mismatch": self.mismatch}
        known = {name: value for name, value in values.items() if value is not None and not math.isnan(value)}
        return " ".join(f"{name[0]}{sum(value > limit for limit in LIMITS[name])}" for name, value in known.items())

    @property
    def numbers(self) -> str:
        policy = "" if self.policy is None else f", policy {self.policy:.3g}"
        differ = "" if self.mismatch is None else f", they differ by {self.mismatch:.3g}"
        advantage = "" if self.advantage is None else f", advantage {self.advantage:.3g}"
        return f"engine {self.engine:.3g}{policy}{differ}{advantage}"


@dataclass(frozen=True)
class Answer:
    """A sampled answer: what it is an example of, its texts, and its numbers in words."""

    why: str
    run: str
    step: int
    prompt: str
    expected: str
    response: str
    facts: str
    tokens: tuple[Token, ...] = ()  # some of the answer's; () if the run kept none


def choose_answers(run: RunRecords) -> tuple[Answer, ...]:
    """Choose the best, worst, longest and most mismatched answer of some steps, and questions asked several times."""
    steps = sorted(step for step, lines in run.samples.items() if lines)
    shown = list(dict.fromkeys([*evenly_spaced(steps, STEPS - 1), *steps[-1:]]))
    return (*(one for step in shown for one in _of_step(run, step)), *_same_questions(run))


def _of_step(run: RunRecords, step: int) -> Iterator[Answer]:
    lines = run.samples[step]
    rewarded = [line for line in lines if line.get("reward") is not None]
    if rewarded:
        yield _answer("best", run, step, max(rewarded, key=lambda line: float(line["reward"])))
        yield _answer("worst", run, step, min(rewarded, key=lambda line: float(line["reward"])))
    # Many answers are cut off at the same length: prefer one whose tokens are known.
    yield _answer(
        "longest", run, step, max(lines, key=lambda line: (int(line.get("tokens", 0)), "token_details" in line))
    )
    mismatched = [(largest, line) for line in lines if (largest := _largest_mismatch(line)) is not None]
    if mismatched:
        largest, line = max(mismatched, key=lambda pair: pair[0])
        yield _answer("most mismatched token", run, step, line, f"{largest:.3g} nats between engine and policy")


def _largest_mismatch(line: Line) -> float | None:
    return max((one.mismatch for one in _tokens(line) if one.mismatch is not None), default=None)


def _same_questions(run: RunRecords) -> Iterator[Answer]:
    """Yield the first answer to a question each time it was asked: in evaluations if there are any, else in steps."""
    source = run.eval_samples or run.samples
    asked = Counter(key for lines in source.values() for key in {_question(line) for line in lines})
    for question, count in asked.most_common(QUESTIONS):
        if count < 2:
            return
        steps = [step for step in sorted(source) if any(_question(line) == question for line in source[step])]
        for step in dict.fromkeys([*evenly_spaced(steps, TIMES - 1), steps[-1]]):
            line = next(line for line in source[step] if _question(line) == question)
            yield _answer("same question", run, step, line)


def _question(line: Line) -> tuple[str, str]:
    return str(line.get("set", "")), str(line.get("prompt_index"))


def _answer(why: str, run: RunRecords, step: int, line: Line, fact: str = "") -> Answer:
    reward, correct = line.get("reward"), line.get("is_correct")
    facts = [
        f"reward {reward:g}" if isinstance(reward, int | float) else "",
        "" if correct is None else "right" if correct else "wrong",
        fact,
        f"{line.get('tokens', '?')} tokens",
        "truncated" if line.get("truncated") else "",
    ]
    texts = {key: shortened(str(line.get(key) or "")) for key in ("prompt", "expected", "response")}
    return Answer(why, run.name, step, **texts, facts=", ".join(filter(None, facts)), tokens=_tokens(line))


def _tokens(line: Line) -> tuple[Token, ...]:
    kept = line.get("token_details") or {}
    pieces = [encodable(str(piece)) for piece in kept.get("pieces", ())]
    policy = kept.get("policy") or [None] * len(pieces)
    engine = map(_number, kept.get("engine", ()))
    advantages = map(_number, given) if (given := kept.get("advantages")) else [None] * len(pieces)
    return tuple(starmap(Token, zip(pieces, engine, policy, advantages, strict=False)))


def _number(value: float | None) -> float:
    return math.nan if value is None else value  # JSON has no other word for values that are not finite


def shortened(text: str) -> str:
    """Return a text; of a long one the first and last CHARACTERS / 2."""
    text = encodable(text)
    if len(text) <= CHARACTERS:
        return text
    half = CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
