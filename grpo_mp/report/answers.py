"""Solve rates of groups, and which answers to read. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from grpo_mp.monitor.samples import evenly_spaced
from grpo_mp.report.contents import Answer, Chart, Series
from grpo_mp.report.records import Line, RunRecords

CHARACTERS = 4000  # of a text: its first and last half
STEPS = 4  # at which answers are shown
BINS = ("none", "up to a third", "up to two thirds", "more", "all")  # of a group's answers are right


def solve_rate_charts(runs: Sequence[RunRecords]) -> tuple[Chart, ...]:
    """Return for each run the share of groups in each of BINS over the steps whose samples were read."""
    return tuple(chart for run in runs if (chart := _solve_rates(run, len(runs) > 1)).series[0].x)


def _solve_rates(run: RunRecords, with_run: bool) -> Chart:
    counts = {step: Counter(map(solve_bin, group_rates(lines))) for step, lines in sorted(run.samples.items())}
    known = {step: count for step, count in counts.items() if count}
    series = tuple(
        Series(name, tuple(known), tuple(count[index] / count.total() for count in known.values()))
        for index, name in enumerate(BINS)
    )
    title = f"Groups by solve rate, {run.name}" if with_run else "Groups by solve rate"
    return Chart(
        title,
        "share of groups",
        series,
        "How many of a group's answers are right, of the groups in samples/ (monitor.samples_per_step).",
        stacked=True,
    )


def group_rates(lines: Iterable[Line]) -> list[float]:
    """Return the share of right answers in each group whose answers are right or wrong."""
    judged: dict[object, list[bool]] = defaultdict(list)
    for line in lines:
        if line.get("is_correct") is not None:
            judged[line.get("group_id")].append(bool(line["is_correct"]))
    return [sum(group) / len(group) for group in judged.values()]


def solve_bin(rate: float) -> int:
    """Return the index in BINS of a share of right answers."""
    return 0 if rate == 0 else 4 if rate == 1 else 1 + (rate > 1 / 3) + (rate > 2 / 3)


def choose_answers(run: RunRecords) -> tuple[Answer, ...]:
    """Choose the best, worst and longest answer of some steps, and a question that came again, at each of its steps."""
    steps = sorted(step for step, lines in run.samples.items() if lines)
    shown = list(dict.fromkeys([*evenly_spaced(steps, STEPS - 1), *steps[-1:]]))
    return (*(one for step in shown for one in _of_step(run, step)), *_same_question(run, steps))


def _of_step(run: RunRecords, step: int) -> Iterator[Answer]:
    lines = run.samples[step]
    rewarded = [line for line in lines if line.get("reward") is not None]
    if rewarded:
        yield _answer("best", run.name, step, max(rewarded, key=lambda line: float(line["reward"])))
        yield _answer("worst", run.name, step, min(rewarded, key=lambda line: float(line["reward"])))
    yield _answer("longest", run.name, step, max(lines, key=lambda line: int(line.get("tokens", 0))))


def _same_question(run: RunRecords, steps: Sequence[int]) -> Iterator[Answer]:
    """Yield the first answer to the question that most steps asked, at each of them, where it came more than once."""
    asked = Counter(index for step in steps for index in {line.get("prompt_index") for line in run.samples[step]})
    index, count = asked.most_common(1)[0] if asked else (None, 0)
    if index is None or count < 2:
        return
    for step in steps:
        for line in [line for line in run.samples[step] if line.get("prompt_index") == index][:1]:
            yield _answer("same question", run.name, step, line)


def _answer(why: str, run: str, step: int, line: Line) -> Answer:
    judged = {True: "right", False: "wrong"}.get(line.get("is_correct"))  # type: ignore[arg-type]
    reward = line.get("reward")
    facts = [f"reward {reward:g}" if isinstance(reward, int | float) else "", judged or ""]
    facts += [f"{line.get('tokens', '?')} tokens", "truncated" if line.get("truncated") else ""]
    prompt, expected, response = (shortened(str(line.get(key) or "")) for key in ("prompt", "expected", "response"))
    return Answer(why, run, step, prompt, expected, response, ", ".join(filter(None, facts)))


def shortened(text: str) -> str:
    """Return a text, of a long one the first and last CHARACTERS / 2, with how many are left out between."""
    text = text.encode("utf-8", "replace").decode()  # half surrogates, which no page can hold
    if len(text) <= CHARACTERS:
        return text
    half = CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
