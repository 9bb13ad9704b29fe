"""Which answers to read, and what their tokens show."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import starmap

from grpo_mp.monitor.report.contents import Answer, Token
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


def choose_answers(run: RunRecords, number: int) -> tuple[Answer, ...]:
    """Choose the best, worst, longest and most mismatched answer of some steps, and questions that came again.

    `number`: place of the run in the report.
    """
    steps = sorted(step for step, lines in run.samples.items() if lines)
    shown = list(dict.fromkeys([*evenly_spaced(steps, STEPS - 1), *steps[-1:]]))
    return (*(one for step in shown for one in _of_step(run, number, step)), *_same_questions(run, number))


def _of_step(run: RunRecords, number: int, step: int) -> Iterator[Answer]:
    lines = run.samples[step]
    rewarded = [line for line in lines if line.get("reward") is not None]
    if rewarded:
        yield _answer("best", number, step, max(rewarded, key=lambda line: float(line["reward"])))
        yield _answer("worst", number, step, min(rewarded, key=lambda line: float(line["reward"])))
    longest = max(lines, key=lambda line: (int(line.get("tokens", 0)), "token_details" in line))  # many are cut off
    yield _answer("longest", number, step, longest)
    mismatched = [(largest, line) for line in lines if (largest := _largest_mismatch(line)) is not None]
    if mismatched:
        largest, line = max(mismatched, key=lambda pair: pair[0])
        yield _answer("most mismatched token", number, step, line, f"{largest:.3g} nats between engine and policy")


def _largest_mismatch(line: Line) -> float | None:
    return max((one.mismatch for one in _tokens(line) if one.mismatch is not None), default=None)


def _same_questions(run: RunRecords, number: int) -> Iterator[Answer]:
    """Yield the first answer to a question at each of the times it was asked: of evaluations, else of the steps."""
    source = run.eval_samples or run.samples
    asked = Counter(key for lines in source.values() for key in {_question(line) for line in lines})
    for question, count in asked.most_common(QUESTIONS):
        steps = [step for step in sorted(source) if any(_question(line) == question for line in source[step])]
        if count < 2:
            return
        for step in dict.fromkeys([*evenly_spaced(steps, TIMES - 1), steps[-1]]):
            line = next(line for line in source[step] if _question(line) == question)
            yield _answer("same question", number, step, line)


def _question(line: Line) -> tuple[str, str]:
    return str(line.get("set", "")), str(line.get("prompt_index"))


def _answer(why: str, run: int, step: int, line: Line, fact: str = "") -> Answer:
    judged = {True: "right", False: "wrong"}.get(line.get("is_correct"), "")  # type: ignore[arg-type]
    reward = line.get("reward")
    facts = [f"reward {reward:g}" if isinstance(reward, int | float) else "", judged, fact]
    facts += [f"{line.get('tokens', '?')} tokens", "truncated" if line.get("truncated") else ""]
    prompt, expected, response = (shortened(str(line.get(key) or "")) for key in ("prompt", "expected", "response"))
    text = ", ".join(filter(None, facts))
    return Answer(
        why,
        run,
        step=step,
        prompt=prompt,
        expected=expected,
        response=response,
        facts=text,
        tokens=_tokens(line),
        judged=judged,
    )


def _tokens(line: Line) -> tuple[Token, ...]:
    """Return the tokens that the run kept of an answer; () where it kept none."""
    kept = line.get("token_details") or {}
    pieces = [encodable(str(piece)) for piece in kept.get("pieces", ())]
    policy = kept.get("policy") or [None] * len(pieces)
    engine = map(_number, kept.get("engine", ()))
    advantages = map(_number, given) if (given := kept.get("advantages")) else [None] * len(pieces)
    return tuple(starmap(Token, zip(pieces, engine, policy, advantages, strict=False)))


def _number(value: float | None) -> float:
    return math.nan if value is None else value  # JSON has no other word for what is not finite


def token_classes(token: Token) -> str:
    """Return the classes of a token on the page: p0 to p4 by probability, m by mismatch, a by advantage."""
    values = {"probability": math.exp(min(token.engine, 0.0)), "advantage": token.advantage, "mismatch": token.mismatch}
    known = {name: value for name, value in values.items() if value is not None and not math.isnan(value)}
    return " ".join(f"{name[0]}{sum(value > limit for limit in LIMITS[name])}" for name, value in known.items())


def describe_token(token: Token) -> str:
    """Say a token's numbers."""
    policy = "" if token.policy is None else f", policy {token.policy:.3g}"
    advantage = "" if token.advantage is None else f", advantage {token.advantage:.3g}"
    differ = "" if token.mismatch is None else f", they differ by {token.mismatch:.3g}"
    return f"engine {token.engine:.3g}{policy}{differ}{advantage}"


def striking_tokens(answer: Answer, count: int = 5) -> list[Token]:
    """Return the tokens that engine and policy see most differently; where that is not known, the least likely."""
    by_mismatch = [one for one in answer.tokens if one.mismatch is not None]
    if by_mismatch:
        return sorted(by_mismatch, key=lambda one: -(one.mismatch or 0.0))[:count]
    return sorted(answer.tokens, key=lambda one: one.engine)[:count]


def shortened(text: str) -> str:
    """Return a text, of a long one the first and last CHARACTERS / 2, with how many are left out between."""
    text = encodable(text)
    if len(text) <= CHARACTERS:
        return text
    half = CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
