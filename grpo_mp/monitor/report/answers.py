"""Select the answers of a run that are worth reading."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from grpo_mp.monitor.run_folder import Line, RunRecords
from grpo_mp.monitor.samples import evenly_spaced
from grpo_mp.utils.files import encodable

CHARACTERS = 4000  # longer texts are cut in the middle
STEPS = 4  # steps whose answers are shown
QUESTIONS, TIMES = 2, 6  # recurring questions, and how often each is shown


@dataclass(frozen=True)
class Answer:
    """A sampled answer. `why`: reason for the selection, such as "best"; `facts`: reward, correctness and length."""

    why: str
    run: str
    step: int
    prompt: str
    expected: str
    response: str
    facts: str


def choose_answers(run: RunRecords) -> tuple[Answer, ...]:
    """Return the best, worst and longest answer of some steps, and answers to recurring questions."""
    steps = sorted(step for step, lines in run.samples.items() if lines)
    shown = list(dict.fromkeys([*evenly_spaced(steps, STEPS - 1), *steps[-1:]]))
    return (*(one for step in shown for one in _of_step(run, step)), *_same_questions(run))


def _of_step(run: RunRecords, step: int) -> Iterator[Answer]:
    lines = run.samples[step]
    rewarded = [line for line in lines if line.get("reward") is not None]
    if rewarded:
        yield _answer("best", run, step, max(rewarded, key=lambda line: float(line["reward"])))
        yield _answer("worst", run, step, min(rewarded, key=lambda line: float(line["reward"])))
    yield _answer("longest", run, step, max(lines, key=lambda line: int(line.get("tokens", 0))))


def _same_questions(run: RunRecords) -> Iterator[Answer]:
    """Yield the first answer to each recurring question at several steps: of evaluations if any, else of training."""
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


def _answer(why: str, run: RunRecords, step: int, line: Line) -> Answer:
    reward, correct = line.get("reward"), line.get("is_correct")
    facts = [
        f"reward {reward:g}" if isinstance(reward, int | float) else "",
        "" if correct is None else "right" if correct else "wrong",
        f"{line.get('tokens', '?')} tokens",
        "truncated" if line.get("truncated") else "",
    ]
    texts = {key: shortened(str(line.get(key) or "")) for key in ("prompt", "expected", "response")}
    return Answer(why, run.name, step, **texts, facts=", ".join(filter(None, facts)))


def shortened(text: str) -> str:
    """Shorten a text to its first and last CHARACTERS / 2 characters."""
    text = encodable(text)
    if len(text) <= CHARACTERS:
        return text
    half = CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
