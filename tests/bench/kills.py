"""Runs whose processes are killed at random moments: python -m tests.bench.kills [--kills 100] [--schedule S]

Two ranks train the tests' tiny mixture on deterministic engines, with evaluations, checkpoints and exports.
A process is killed (SIGKILL) at a random moment: a rank, an engine, a child of an engine, the launcher, or all. A job
that ends is started again by the same command, until the run has all its steps; then a new run begins. Printed are each
kill with its phase, and at the end how many samples were scored again, which groups and episodes were that a kill found
on disk (none may be: only what runs may be generated again), and what the runs say and leave otherwise than the
undisturbed one: metrics of every step, samples, weights. The last line begins with PASSED or FAILED; the status
says the same. With `--folder F` a bench that was stopped goes on there after its last whole run.
"""

import argparse
import json
import os
import pickle
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import psutil

from grpo_mp.checkpoint.run_state import ROLLOUTS
from grpo_mp.rollout.journal import read_records
from grpo_mp.utils.files import write_json
from tests.conftest import make_tiny_run
from tests.e2e.jobs import LAUNCH, Job, read_jsonl

TARGETS = ("rank 0", "rank 1", "engine", "engine's child", "launcher", "all")
ENDS_NO_JOB = ("engine", "engine's child")
EARLY = 0.2  # of the kills: while a job starts
START = "start"
OF_TIME = ("time/", "speed/", "memory/", "engine/", "sync/bytes_per_s")
OF_SYNCS = ("sync/bytes", "sync/rounds", "sync/engines")  # of an engine that starts again
OWN_RANK = ("engine.ranks=1", "layout={}")
SCHEDULES = {
    "colocated": (),
    "partial": ("rollout.max_staleness=1", "rollout.tokens_ahead=6"),
    "one_step_off": ("schedule=one_step_off", *OWN_RANK),
    "async": ("schedule=async", "rollout.max_staleness=2", "rollout.tokens_ahead=6", *OWN_RANK),
    "turns": ("schedule=async", "rollout.max_staleness=2", "rollout.tokens_ahead=6", *OWN_RANK),
    "tools": ("rollout.tools=[tools.tiny.calculator:calculator]", "rollout.tool_parser=pythonic"),
}
FUNCTIONS = {"turns": "two_turns", "tools": "ask_the_calculator"}  # of the schedules with episodes
BEGUN = "begun.txt"  # beside the functions: a line an episode, its step, the prompt's text and epoch, and its index
# A tiny policy calls no tool by itself; what it says decides what is computed.
TURNS = f"""
from pathlib import Path

from grpo_mp.rollout.protocol import ToolCall

async def two_turns(task, policy):
    return await ask(task, policy, lambda first: "again")

async def ask_the_calculator(task, policy):
    call = lambda first: ToolCall("calculator", {{"expression": f"{{len(first.text)}}*{{first.tokens[0]}}"}}, "", "")
    return await ask(task, policy, lambda first: task.tools.call(call(first)))

async def ask(task, policy, more):
    with (Path(__file__).parent / "{BEGUN}").open("a") as lines:
        lines.write(f"{{task.step}}\\t{{task.prompt.text}}\\t{{task.prompt.epoch}}\\t{{task.index}}\\n")
    first = await policy.generate(task.messages)
    said = more(first)
    result = said if isinstance(said, str) else await said
    content = result if isinstance(result, str) else result.text
    await policy.generate([*task.messages, first.message, {{"role": "user", "content": content}}])
    return policy.episode(metrics={{"digits": sum(map(str.isdigit, content))}})
"""
SCORED = "scored.txt"  # beside the reward: a line a group, the number of its samples and a checksum of them
REWARD = f"""
from hashlib import sha256
from pathlib import Path

def letters(completions, **_):
    with (Path(__file__).parent / "{SCORED}").open("a") as lines:
        lines.write(f"{{len(completions)}} {{sha256(repr(list(completions)).encode()).hexdigest()}}\\n")
    return [sum(map(str.isalpha, text)) / 10 for text in completions]
"""
EVAL_GROUP = 2  # samples of a prompt in an evaluation
FOUND = "found.json"  # of a bench that may go on


@dataclass
class Found:
    """What became of the kills so far."""

    start_s: float = 0.0  # of the undisturbed run, until its first phase
    training_s: float = 0.0  # from there on
    samples: int = 0  # that it scored
    kills: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    starts: int = 0
    left: list[str] = field(default_factory=list)  # processes that a job left behind
    again: int = 0  # samples that were scored more often than in an undisturbed run
    repeated: list[str] = field(default_factory=list)  # what was generated again that a kill found on disk
    different: list[str] = field(default_factory=list)  # what a run says otherwise than the undisturbed one

    @classmethod
    def read(cls, file: Path) -> "Found":
        values = json.loads(file.read_text())
        counters = {name: Counter(values[name]) for name in ("kills", "phases")}
        return cls(**values | counters)

    def as_json(self) -> dict[str, Any]:
        """Return what `read` reads; dataclasses.asdict breaks counters, whose items it takes for what is counted."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    def failures(self) -> list[str]:
        return [
            *(f"different: {what}" for what in self.different),
            *(f"left behind: {command}" for command in self.left),
            *(f"recorded, and generated again: {what}" for what in self.repeated),
        ]


@dataclass
class Kill:
    """What a kill found: how much had been written beside the functions, and what the run's journals had."""

    begun: int  # episodes
    scored: int  # groups
    recorded: set[str]  # episodes, and checksums of groups

    @classmethod
    def of(cls, folder: Path, run: Path) -> "Kill":
        """Read what a kill will find now: first what is recorded, all of which had begun and been scored before."""
        found = recorded(run / ROLLOUTS)
        return cls(len(begun_episodes(folder)), len(scored_groups(folder)), found)

    def repeated(self, folder: Path) -> list[str]:
        scored = (checksum for _, checksum in scored_groups(folder)[self.scored :])
        return sorted(self.recorded.intersection([*begun_episodes(folder)[self.begun :], *scored]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="colocated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep all there, and go on with what is there")
    given = parser.parse_args(arguments)
    with open_folder(given.folder) as folder:
        settings = make_inputs(folder, given.schedule, given.steps, given.kills)
        file = folder / FOUND
        undisturbed = folder / "undisturbed"
        found = Found.read(file) if file.exists() else run_undisturbed(folder, settings, undisturbed)
        write_json(file, found.as_json())
        expected = evidence(undisturbed)
        while found.kills.total() < given.kills:
            run = folder / f"run_{time.time_ns()}"
            random = Random(f"{given.seed}/{found.runs}")  # another moment where a run was done before the kill was due
            forget(folder)
            found_by = disturb(folder, [*settings, f"run.folder={run}"], run, random, found, given.kills)
            found.runs += 1
            found.again += count_scored(folder) - found.samples
            found.repeated += [f"run {found.runs}: {what}" for kill in found_by for what in kill.repeated(folder)]
            actual = evidence(run)
            found.different += [f"run {found.runs}: {what}" for what in expected if actual.get(what) != expected[what]]
            found.different += [f"run {found.runs}: {what} is new" for what in actual.keys() - expected.keys()]
            write_json(file, found.as_json())
    report(found)


@contextmanager
def open_folder(given: Path | None) -> Iterator[Path]:
    """Make the given folder, or one that is gone after the body."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = given or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def report(found: Found) -> None:
    print(f"kills: {dict(found.kills)}; in phases {dict(found.phases)}")
    print(f"{found.runs} runs of {found.starts} starts; processes left: {found.left or 'none'}")
    print(f"samples that were scored once more than without kills: {found.again} ({found.samples} a run)")
    count = found.kills.total()
    end(
        found.failures(), f"{count} of {count} kills: every run as the undisturbed one, no process left, no sample lost"
    )


def end(failures: Sequence[str], passed: str) -> None:
    """Print failures and the last line; exit with status 1 if there are failures."""
    for failure in failures:
        print(failure)
    if failures:
        print(f"FAILED: {len(failures)} failures")
        sys.exit(1)
    print(f"PASSED: {passed}")


def make_inputs(folder: Path, schedule: str, steps: int, kills: int) -> list[str]:
    """Make model, data, reward and rollout function in a folder; return the arguments of a run on them."""
    config = folder / "config.yaml"
    if not config.exists():
        make_tiny_run(folder)
    (folder / "reward.py").write_text(REWARD)
    (folder / "turns.py").write_text(TURNS)
    settings = [str(config), f"reward.functions={{{folder / 'reward.py'}:letters: 1.0}}"]
    settings += ["engine.deterministic=true", f"run.steps={steps}", "run.save_every=2", "run.export_every=3"]
    settings += ["run.eval_every=3", f"data.eval.arithmetic.samples={EVAL_GROUP}", f"engine.max_restarts={kills}"]
    function = FUNCTIONS.get(schedule)
    turns = [f"rollout.function={folder / 'turns.py'}:{function}"] if function else []
    return [*settings, *SCHEDULES[schedule], *turns]


def run_undisturbed(folder: Path, settings: Sequence[str], run: Path) -> Found:
    begun = time.time()
    job = Job(folder, [*settings, f"run.folder={run}"])
    try:
        job.wait_until(lambda: last_phase(run, begun) != START)
        start_s = time.time() - begun
        assert job.wait() == 0, job.err
    finally:
        job.end()
    found = Found(start_s, time.time() - begun - start_s, count_scored(folder))
    print(f"undisturbed: start {found.start_s:.0f} s, training {found.training_s:.0f} s", flush=True)
    return found


def disturb(folder: Path, settings: list[str], run: Path, random: Random, found: Found, kills: int) -> list[Kill]:
    """Start a run again and again until it is done, and kill meanwhile; return what each kill found."""
    ends = False
    found_by = list[Kill]()
    while not ends:
        job = Job(folder, settings, LAUNCH)
        found.starts += 1
        try:
            ends = kill_until_it_ends(job, run, random, found, kills, lambda: found_by.append(Kill.of(folder, run)))
            found.left += job.left()
        finally:
            job.end()
    return found_by


def kill_until_it_ends(
    job: Job, run: Path, random: Random, found: Found, kills: int, before: Callable[[], None]
) -> bool:
    """Kill processes of one job at random moments, and call `before` each; return whether it ended well."""
    phase = ""
    started = time.time()
    while True:
        early = random.random() < EARLY
        while not early and job.poll() is None and last_phase(run, started) == START:
            time.sleep(0.2)
        due = time.monotonic() + random.uniform(0.0, found.start_s if early else found.training_s)
        while (status := job.poll()) is None and (time.monotonic() < due or found.kills.total() >= kills):
            time.sleep(0.02)
        if status is not None:
            # An engine that dies before the first step is taken for one that cannot start.
            assert status == 0 or phase == START, f"the job failed, and nobody had killed it:\n{job.err}"
            return status == 0
        target = random.choice(TARGETS)
        phase = last_phase(run, started)
        victims = processes(job, target)
        if not victims:
            continue
        before()
        for victim in victims if target == "all" else [random.choice(victims)]:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        found.kills[target] += 1
        found.phases[phase] += 1
        print(f"{found.kills.total():3} {target:15} {phase}", flush=True)
        if target not in ENDS_NO_JOB:
            job.wait()
            return False


def processes(job: Job, target: str) -> list[psutil.Process]:
    ranks = children_of(psutil.Process(job.pid), recursive=False)
    if target == "launcher":
        return [psutil.Process(job.pid)]
    if target == "all":
        return job.alive()
    if target.startswith("rank"):
        return [rank for rank in ranks if rank_of(rank) == target.removeprefix("rank ")]
    engines = [
        child for rank in ranks for child in children_of(rank) if "grpo_mp.rollout.engine_main" in command(child)
    ]
    if target == "engine":
        return engines
    return [child for engine in engines for child in children_of(engine) if child not in engines]


def children_of(process: psutil.Process, recursive: bool = True) -> list[psutil.Process]:
    """Return the processes below one; none where it has just ended."""
    try:
        return process.children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


def command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def rank_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("RANK")
    except psutil.Error:
        return None


def last_phase(run: Path, started: float) -> str:
    """Return the phase that rank 0 of a job that was `started` then began last; START: it has not trained yet."""
    trace = run / "trace" / "rank_0.json"
    lines = trace.read_text().splitlines() if trace.exists() else []
    begun = [json.loads(line.strip("[,")) for line in lines if '"ph": "B"' in line]
    names = [event["name"] for event in begun if event["ts"] > started * 1e6]
    return names[-1] if "GENERATE" in names else START


def forget(folder: Path) -> None:
    for name in (SCORED, BEGUN):
        (folder / name).unlink(missing_ok=True)


def scored_groups(folder: Path) -> list[tuple[int, str]]:
    """Return the samples and the checksum of each group that was scored, in order; a line may be on its way."""
    file = folder / SCORED
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [(int(line.split()[0]), line.split()[1]) for line in lines]


def count_scored(folder: Path) -> int:
    return sum(samples for samples, _ in scored_groups(folder))


def begun_episodes(folder: Path) -> list[str]:
    """Return what names each episode of training that was begun, in order."""
    file = folder / BEGUN
    train = {row["question"]: index for index, row in enumerate(read_jsonl(folder / "train.jsonl"))}
    names = []
    for line in file.read_text().split("\n")[:-1] if file.exists() else []:
        _, text, epoch, index = line.split("\t")
        if text in train:
            names.append(f"train/{train[text]}/{epoch}/{index}")
    return names


def recorded(journals: Path) -> set[str]:
    """Return what journals have: episodes as `begun_episodes` names them, and the checksum of each finished group."""
    found = set[str]()
    # The run may just remove those of an older step: os.walk passes over a folder that is gone, Path.glob does not.
    files = [Path(folder) / name for folder, _, names in os.walk(journals) for name in names]
    for file in (file for file in files if file.suffix == ".journal"):
        with suppress(FileNotFoundError):
            found |= recorded_in(file)
    return found


def recorded_in(file: Path) -> set[str]:
    found = set[str]()
    for record in read_records(file):
        with file.open("rb") as stream:
            stream.seek(record.offset)
            pickle.load(stream)  # the facts
            group, _ = pickle.load(stream)
        _, prompt, epoch = record.key
        found |= {f"train/{prompt}/{epoch}/{sample.index}" for sample in group.samples if sample.state}
        if record.extent.finished:
            found.add(sha256(repr([sample.text for sample in group.samples]).encode()).hexdigest())
    return found


def evidence(run: Path) -> Mapping[str, object]:
    """Return what a run says and leaves, by name, but for seconds and memory."""
    lines = read_jsonl(run / "metrics.jsonl")
    found: dict[str, object] = {"steps": [line["step"] for line in lines]}
    for line in lines:
        values = {name: value for name, value in line.items() if not name.startswith((*OF_TIME, *OF_SYNCS))}
        found |= {f"step {line['step']}: {name}": value for name, value in values.items()}
    for file in sorted([*run.glob("samples/step_*.jsonl"), *run.glob("**/*.safetensors")]):
        found[str(file.relative_to(run))] = sha256(file.read_bytes()).hexdigest()
    return found


if __name__ == "__main__":
    main()
