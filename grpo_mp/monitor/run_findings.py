"""What is wrong with a run, going on or ended: its engines' model, its warnings, its time. Pure but `read_run`."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from grpo_mp.checkpoint.run_state import METRICS, SETTINGS
from grpo_mp.monitor.live_engines import EngineWeights
from grpo_mp.monitor.live_ranks import has_processes
from grpo_mp.monitor.loggers import read_metrics
from grpo_mp.monitor.plan_file import PLAN, read_plan
from grpo_mp.monitor.rules import MetricLine
from grpo_mp.monitor.run_warnings import run_warnings
from grpo_mp.monitor.timeline import Event, rank_traces
from grpo_mp.rollout.engine_load import EngineLoad, read_loads
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.files import last_lines
from grpo_mp.utils.findings import Finding, Level
from grpo_mp.utils.log import log_file
from grpo_mp.utils.phases import MOVE, SAVE_WAIT, WAIT, WEIGHT_CHECK, Phase
from grpo_mp.utils.reading import check_regular, read_yaml, refuse_unreadable
from grpo_mp.weight_sync.compare import ROUNDING_FACTOR, WRONG_FACTOR

LAST_STEPS = 20  # whose times count
BETWEEN = (Phase.SAVE, Phase.EVAL)  # steps
SLOW_PHASE = 1.5  # times the plan's
SLOW_RANK, SLOW_ENGINE = 1.2, 0.7  # times the median: of a rank's work, of an engine's speed; of two the better
MOST_IDLE, MOST_OVERHEAD = 0.5, 0.1  # shares of a step
MIN_BUSY_POLLS = 30  # of the busiest engine: shares of fewer polls differ by chance
MOST_EMPTY = 0.3  # share of the time in which an engine has nothing to do and another one has
# What to do about time outside the phases that count as work, by the name of the time.
OVERHEADS = {
    Phase.SCORE.lower(): "make the reward functions faster, or give reward models more devices",
    SAVE_WAIT.lower(): "save less often (run.save_every), or to a faster disk",
}
CHECK_MEAN, CHECK_LIMIT, CHECK_TOKENS = "sync/check/logprob_abs_diff/mean", "sync/check/limit", "sync/check/tokens"
RECHECK_TOKENS = 4  # times the fewest: answers of a step are of many lengths


@dataclass(frozen=True)
class RunFacts:
    """What a run folder says. `traces`: the last events of each rank; `plan`: seconds of a step by phase, {}: none.

    `plan_problem`: why the plan is not one, "" where it is.
    """

    folder: Path
    settings: Mapping[str, Any]
    metrics: Sequence[MetricLine]
    loads: Mapping[int, Sequence[EngineLoad]] = field(default_factory=dict)
    traces: Mapping[int, Sequence[Event]] = field(default_factory=dict)
    plan: Mapping[str, float] = field(default_factory=dict)
    plan_problem: str = ""
    goes_on: bool = True
    last_log_line: str = ""  # of rank 0


def read_run(folder: Path) -> RunFacts:
    """Read a run folder. Raises UserError where it is none, has no step yet, or a file of it cannot be read."""
    if not (folder / SETTINGS).is_file():
        raise UserError(f"{folder}: no run folder, it has no {SETTINGS}: give the run.folder of a run")
    settings = read_yaml(folder / SETTINGS)
    if not isinstance(settings, dict):
        raise UserError(f"{folder / SETTINGS}: no settings of a run: copy it again")
    with refuse_unreadable(folder):
        metrics = _read_metrics(folder / METRICS)
        if not metrics:
            raise UserError(f"{folder}: no step is in {METRICS} yet: wait, or ask grpo-mp doctor stuck {folder}")
        loads, traces = read_loads(folder), rank_traces(folder)
    try:
        phases, problem = read_plan(folder / PLAN).get("phases", {}), ""
    except UserError as error:
        phases, problem = {}, str(error)
    plan = {name: phase["seconds"] for name, phase in phases.items() if phase["seconds"]}
    log = "".join(last_lines(log_file(folder, 0), 1))
    return RunFacts(folder, settings, metrics, loads, traces, plan, problem, has_processes(folder), log)


def _read_metrics(file: Path) -> list[dict[str, float | None]]:
    """Return the lines of the steps. Raises UserError for a file that is none, or of which no line can be read."""
    if not file.exists():
        return []
    lines = read_metrics(check_regular(file))
    if not lines:
        *complete, rest = file.read_bytes().split(b"\n")
        # The first line of a run may still be written.
        if any(line.strip() for line in complete) or not b"{".startswith(rest[:1]):
            raise UserError(f"{file}: it is damaged, no line of it is that of a step: copy it again from the run")
    return lines


def diagnose_run(facts: RunFacts, engines: Sequence[EngineWeights] = ()) -> list[Finding]:
    """Return what is found; `engines`: those that answer now."""
    return [
        *check_end(facts),
        *check_sync(facts.metrics),
        *check_live(engines),
        *run_warnings(facts.metrics),
        *_unplanned(facts.plan_problem),
        *check_times(facts.metrics, facts.plan),
        *check_ranks(facts.traces),
        *check_engines(facts.loads),
    ]


def check_end(facts: RunFacts) -> Iterable[Finding]:
    """Yield that a run has stopped before its last step, where it has."""
    last, steps = facts.metrics[-1]["step"] or 0, (facts.settings.get("run") or {}).get("steps")
    if isinstance(steps, int) and last < steps and not facts.goes_on:
        evidence = [f"the log of rank 0 ends with: {one_line(facts.last_log_line, 300)}"] if facts.last_log_line else []
        sentence = f"the run stopped after step {last:g} of {steps}, and none of its processes is there"
        yield Finding(Level.WARNING, sentence, evidence, "start the same command again: it goes on there")


def _unplanned(problem: str) -> Iterable[Finding]:
    if problem:
        yield Finding(Level.WARNING, "times are not compared with the plan, which cannot be read", (problem,))


def check_sync(lines: Sequence[MetricLine]) -> Iterable[Finding]:
    """Yield whether the engines had the policy's model after each weight sync."""
    checked = [line for line in lines if CHECK_MEAN in line]
    if not checked:
        yield Finding(Level.OK, "no weight sync was checked: the run has no engines, as a replay")
        return
    yield from _judge_checks(checked)
    last = lines[-1]
    served, made = last.get("sync/weight_version"), last.get("train/optimizer_step")
    if served is not None and made is not None and served != made:
        sentence = f"the engines serve the weights of update {served:g}, the policy is at {made:g}"
        yield Finding(Level.ERROR, sentence, (), "a defect of the program: report it with the rank's log")
    working = [line["sync/engines"] for line in lines if line.get("sync/engines") is not None]
    if working and (working[-1] or 0) < max(number or 0 for number in working):
        sentence = f"{working[-1]:g} engines take the weights, there were {max(n or 0 for n in working):g}"
        yield Finding(
            Level.WARNING, sentence, (), "read logs/engine_*_lost_*.log: these engines start again, or have left"
        )


def _judge_checks(lines: Sequence[MetricLine]) -> Iterable[Finding]:
    """Yield what the checks of the syncs say, each by the limit that the run had."""
    limits = [line.get(CHECK_LIMIT) or math.inf for line in lines]
    if math.inf in limits:
        sentence = f"whether the engines had the policy's model after {len(lines)} weight syncs is not judged"
        yield Finding(Level.WARNING, sentence, (), f"{METRICS} has no {CHECK_LIMIT}: an older version has written it")
        return
    means, fewest = [line[CHECK_MEAN] for line in lines], min(line.get(CHECK_TOKENS) or 0 for line in lines)
    far = [line for line, mean, limit in zip(lines, means, limits, strict=True) if mean is None or not mean <= limit]
    again = [line["step"] for line in lines if (line.get(CHECK_TOKENS) or 0) > RECHECK_TOKENS * fewest]
    largest = max((mean for mean in means if mean is not None), default=0)
    evidence = [f"mean |logprob difference|: at most {largest:.2g}, {min(limits):.2g} is allowed"]
    if again:
        evidence.append(f"compared on more tokens, for a tie of two experts or more, at step {_some(again)}")
    if far:
        evidence += [f"step {line['step']}: {_number(line[CHECK_MEAN])}" for line in far[:8]]
        advice = "read the rank's log of that step, which says why; compare with grpo-mp doctor model"
        last, most = lines[-1][CHECK_MEAN], limits[-1] * WRONG_FACTOR / ROUNDING_FACTOR
        is_wrong = far[-1] is lines[-1] and (last is None or last > most)
        sentence = f"after {len(far)} of {len(lines)} weight syncs the engines' logprobs were not the policy's"
        yield Finding(Level.ERROR if is_wrong else Level.WARNING, sentence, evidence, advice)
    else:
        sentence = f"after each of {len(lines)} weight syncs the engines computed the policy's logprobs"
        yield Finding(Level.OK, sentence, evidence)


def _number(value: float | None) -> str:
    return "no number" if value is None else f"{value:.3g}"


def check_live(engines: Sequence[EngineWeights]) -> Iterable[Finding]:
    """Yield whether engines that answer now hold the same weights."""
    for engine in engines:
        if engine.failure:
            advice = "grpo-mp doctor stuck says what it does; read its log"
            yield Finding(
                Level.WARNING, f"engine {engine.index} does not say what it holds: {engine.failure}", (), advice
            )
    asked = [engine for engine in engines if not engine.failure]
    if not asked:
        return
    versions = {engine.index: engine.version for engine in asked}
    evidence = [f"engine {index}: update {version}" for index, version in versions.items()]
    known = [engine for engine in asked if engine.checksums is not None]
    for changed, reason in ((False, "they sleep or are idle"), (True, "a sync changed their weights meanwhile")):
        without = [engine.index for engine in asked if engine.checksums is None and engine.changed == changed]
        if without:
            evidence.append(f"without checksums, since {reason}: engine {_some(without)}")
    differing = [
        (known[0].index, other.index, name)
        for other in known[1:]
        if other.version == known[0].version
        for name in [first_difference(known[0].checksums or {}, other.checksums or {})]
        if name
    ]
    if differing:
        evidence = [f"engines {one} and {other}: first {name}" for one, other, name in differing] + evidence
        advice = "a sync did not reach one of them: set sync.delta=false, and report it with these lines"
        yield Finding(Level.ERROR, "engines of one weight version hold different weights", evidence, advice)
    elif len(set(versions.values())) > 1:
        yield Finding(Level.OK, "engines are between two weight versions: a sync goes on, ask again", evidence)
    else:
        alike = f", checksums of {len(known[0].checksums or {})} tensors alike" if len(known) > 1 else ""
        sentence = f"{len(asked)} engine{'s' * (len(asked) > 1)} answer with the weights of one update{alike}"
        yield Finding(Level.OK, sentence, evidence)


def first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return the first tensor of which two engines' checksums differ, or that one lacks; "" where none does."""
    return next((name for name in [*one, *other] if one.get(name) != other.get(name)), "")


def check_times(lines: Sequence[MetricLine], plan: Mapping[str, float]) -> Iterable[Finding]:
    """Yield where the time of the last steps went, beside the plan's."""
    last = [line for line in lines if line.get("time/step_s")][-LAST_STEPS:]
    if not last:
        return
    step_s = _mean(last, "time/step_s")
    evidence = []
    for phase in Phase:
        seconds = _mean(last, f"time/{phase.lower()}_s")
        expected = plan.get(phase.lower())
        if not seconds:
            continue
        beside = f", planned {expected:.2f} s" if expected else ""
        evidence.append(f"{phase.lower():8} {seconds:8.2f} s  {seconds / step_s:4.0%}{beside}")
        if expected and seconds > SLOW_PHASE * expected:
            sentence = f"{phase.lower()} takes {seconds:.1f} s a step, the plan says {expected:.1f}"
            yield Finding(Level.WARNING, sentence, (), "grpo-mp doctor machine: clocks, links, disks; then trace.json")
    yield Finding(Level.OK, f"a step takes {step_s:.2f} s, mean of the last {len(last)}; the slowest rank's", evidence)
    idle, overhead = _mean(last, "time/idle_share"), _mean(last, "time/overhead_share")
    if idle > MOST_IDLE:
        advice = (
            "in generate: long answers, see rollout.max_staleness; in train: uneven micro-batches; see the ranks below"
        )
        yield Finding(Level.WARNING, f"ranks wait for others in {idle:.0%} of a step", (), advice)
    if overhead > MOST_OVERHEAD:
        yield Finding(Level.WARNING, f"{overhead:.0%} of a step are outside its phases", *_overhead(last))


def _overhead(lines: Sequence[MetricLine]) -> tuple[Sequence[str], str]:
    """Return what the time outside the phases that count as work was most of, as evidence, and what to do."""
    inside = {phase.lower() for phase in Phase if phase.is_work or phase in BETWEEN}
    known = {name[5:-2] for line in lines for name in line if name.startswith("time/") and name.endswith("_s")}
    inner = {"step", *(name.lower() for name in (WAIT, MOVE, WEIGHT_CHECK))}
    seconds = {name: _mean(lines, f"time/{name}_s") for name in known - inside - inner}
    most = max(sorted(seconds), key=lambda name: seconds[name], default="")
    if not most or not seconds[most]:
        return (), "no time has a name there, as of slow data: look at the gaps in trace.json"
    advice = OVERHEADS.get(most, "open trace.json and look at it")
    return [f"most of it: time/{most}_s, {seconds[most]:.2f} s"], advice


def check_ranks(traces: Mapping[int, Sequence[Event]]) -> Iterable[Finding]:
    """Yield the rank that the others wait for, phase by phase: the one that works longest.

    Ranks that train are compared with each other, and so are those that only host an engine: their work differs.
    """
    work = {rank: worked_seconds(events) for rank, events in traces.items()}
    evidence = []
    for phase, trains in product(Phase, (True, False)):
        of_kind = {rank: phases for rank, phases in work.items() if (Phase.TRAIN in phases) == trains}
        seconds = {rank: phases[phase] for rank, phases in of_kind.items() if phases.get(phase)}
        if len(seconds) < 2:
            continue
        slowest, median = max(seconds, key=lambda rank: seconds[rank]), statistics.median_low(seconds.values())
        says = f"works {seconds[slowest]:.2f} s, the median rank {median:.2f} s"
        evidence.append(f"{phase.lower():8} rank {slowest} {says}")
        if seconds[slowest] > SLOW_RANK * median and phase.is_work and phase is not Phase.GENERATE:
            advice = "compare its GPU's clocks with the others': grpo-mp doctor machine on its node"
            yield Finding(Level.WARNING, f"in {phase.lower()} all wait for rank {slowest}: it {says}", (), advice)
    if evidence:
        yield Finding(Level.OK, "the slowest rank in each phase, its waits left out", evidence)


def worked_seconds(events: Sequence[Event]) -> dict[str, float]:
    """Return the mean seconds of each phase without the WAIT spans inside it, of the last LAST_STEPS times."""
    spans: list[Event] = []
    waited, seconds = 0.0, dict[str, list[float]]()
    for event in events:
        if event["ph"] == "B":
            spans.append(event)
            waited = 0.0 if len(spans) == 1 else waited
        elif event["ph"] == "E" and spans:
            span = spans.pop()
            length = (event["ts"] - span["ts"]) / 1e6
            if span["name"] == WAIT and not any(outer["name"] == WAIT for outer in spans):
                waited += length
            if not spans and span["name"] != WAIT:
                seconds.setdefault(span["name"], []).append(length - waited)
    return {name: statistics.fmean(values[-LAST_STEPS:]) for name, values in seconds.items()}


def check_engines(loads: Mapping[int, Sequence[EngineLoad]]) -> Iterable[Finding]:
    """Yield the slowest engine, and those that have nothing to do while others have."""
    speeds = {
        number: statistics.fmean(values)
        for number, lines in loads.items()
        if (values := [line.tokens_per_s for line in lines if line.tokens_per_s])
    }
    if not speeds:
        return
    evidence = [f"engine {number}: {speed:.0f} tokens/s while it generates" for number, speed in speeds.items()]
    slowest, median = min(speeds, key=lambda number: speeds[number]), statistics.median_high(speeds.values())
    busy = {number: sum(bool(line.running or line.tokens_per_s) for line in lines) for number, lines in loads.items()}
    most = max(busy.values())
    if most < MIN_BUSY_POLLS:
        sentence = f"engines were seen generating in {most} polls, fewer than the {MIN_BUSY_POLLS} that can be compared"
        yield Finding(Level.OK, sentence, evidence, "lower monitor.poll_engines_s where steps are short")
        return
    if speeds[slowest] < SLOW_ENGINE * median:
        advice = "compare its GPU's clocks: grpo-mp doctor machine on its node; read its log"
        sentence = f"engine {slowest} decodes {speeds[slowest]:.0f} tokens/s, the median engine {median:.0f}"
        yield Finding(Level.WARNING, sentence, evidence, advice)
    empty = {number: 1 - count / most for number, count in busy.items() if count < (1 - MOST_EMPTY) * most}
    if empty:
        shares = [f"engine {number}: {share:.0%} of the time of the busiest" for number, share in empty.items()]
        advice = "long answers of a few groups hold the rest up: more groups a step, or rollout.max_staleness"
        yield Finding(Level.WARNING, "engines have nothing to do while others generate", shares, advice)
    queued = [line.queued for lines in loads.values() for line in lines if line.running and line.queued is not None]
    waits = f", {statistics.fmean(queued):.1f} requests are queued at an engine on average" if queued else ""
    sentence = f"engine {slowest} is the slowest of {len(speeds)}" if len(speeds) > 1 else f"engine {slowest} generates"
    yield Finding(Level.OK, f"{sentence}{waits}", evidence)


def _mean(lines: Iterable[MetricLine], name: str) -> float:
    values = [value for line in lines if (value := line.get(name)) is not None]
    return statistics.fmean(values) if values else 0.0


def _some(numbers: Sequence[float | None], most: int = 8) -> str:
    shown = ", ".join(f"{number:g}" for number in numbers[:most] if number is not None)
    return f"{shown} and {len(numbers) - most} more" if len(numbers) > most else shown
