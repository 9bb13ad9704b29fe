"""Runs whose processes are killed at random moments: python -m tests.bench.kills [--kills 100] [--schedule S]

Two ranks train the tests' tiny mixture on deterministic engines, with evaluations, checkpoints and exports.
A process is killed (SIGKILL) at a random moment: a rank, an engine, a child of an engine, the launcher, or all. A job
that ends is started again by the same command, until the run has all its steps; then a new run begins. Printed are each
kill with its phase, and at the end how many samples were scored again, and what the runs say and leave otherwise than
the undisturbed one: metrics of every step, samples, weights. The last line begins with PASSED or FAILED; the status
says the same. With `--folder F` a bench that was stopped goes on there after its last whole run.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import psutil

from grpo_mp.files import write_json
from tests.conftest import EVAL_PROMPTS, make_tiny_run
from tests.e2e.jobs import LAUNCH, Job, read_jsonl

TARGETS = ("rank 0", "rank 1", "engine", "engine's child", "launcher", "all")
ENDS_NO_JOB = ("engine", "engine's child")
EARLY = 0.2  # of the kills: while a job starts
START = "start"
OF_TIME = ("time/", "speed/", "memory/", "sync/bytes_per_s")
OF_SYNCS = ("sync/bytes", "sync/rounds", "sync/largest_round", "sync/engines")  # of an engine that starts again
OWN_RANK = ("engine.ranks=1", "layout={}")
SCHEDULES = {
    "colocated": (),
    "partial": ("rollout.max_staleness=1", "rollout.tokens_ahead=6"),
    "one_step_off": ("schedule=one_step_off", *OWN_RANK),
    "async": ("schedule=async", "rollout.max_staleness=2", "rollout.tokens_ahead=6", *OWN_RANK),
    "turns": ("schedule=async", "rollout.max_staleness=2", "rollout.tokens_ahead=6", *OWN_RANK),
}
TURNS = """
async def two_turns(task, policy):
    first = await policy.generate(task.messages)
    await policy.generate([*task.messages, first.message, {"role": "user", "content": "again"}])
    return policy.episode()
"""
SCORED = "scored.txt"  # beside the reward: a line a group, the number of its samples
REWARD = f"""
from pathlib import Path
from typing import Any

def letters(completions, **_):
    with (Path(__file__).parent / "{SCORED}").open("a") as lines:
        lines.write(str(len(completions)) + " ")
    return [sum(map(str.isalpha, text)) / 10 for text in completions]
"""
PROMPTS, GROUP, EVAL_GROUP = 4, 4, 2  # of a step; samples of a prompt, in an evaluation of fewer
STALENESS = {"partial": 1, "one_step_off": 1, "async": 2, "turns": 2}
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
    different: list[str] = field(default_factory=list)  # what a run says otherwise than the undisturbed one

    @classmethod
    def read(cls, file: Path) -> "Found":
        """Read what an earlier bench found."""
        values = json.loads(file.read_text())
        counters = {name: Counter(values[name]) for name in ("kills", "phases")}
        return cls(**values | counters)

    def as_json(self) -> dict[str, Any]:
        """Return what `read` reads; dataclasses.asdict breaks counters, whose items it takes for what is counted."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    def failures(self, in_flight: int) -> list[str]:
        """Return what is not as it should be; `in_flight`: the most samples that a kill may cost."""
        bound = in_flight * self.kills.total()
        return [
            *(f"different: {what}" for what in self.different),
            *(f"left behind: {command}" for command in self.left),
            *([f"{self.again} samples scored again, at most {bound} were in flight"] if self.again > bound else []),
        ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the text above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="colocated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep all there, and go on with what is there")
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        settings = make_inputs(folder, given.schedule, given.steps, given.kills)
        file, undisturbed = folder / FOUND, folder / "undisturbed"
        found = Found.read(file) if file.exists() else run_undisturbed(folder, settings, undisturbed)
        write_json(file, found.as_json())
        expected = evidence(undisturbed)
        while found.kills.total() < given.kills:
            run, random = folder / f"run_{time.time_ns()}", Random(f"{given.seed}/{found.kills.total()}")
            (folder / SCORED).unlink(missing_ok=True)
            disturb(folder, [*settings, f"run.folder={run}"], run, random, found, given.kills)
            found.runs += 1
            found.again += take_scored(folder) - found.samples
            actual = evidence(run)
            found.different += [f"run {found.runs}: {what}" for what in expected if actual.get(what) != expected[what]]
            found.different += [f"run {found.runs}: {what} is new" for what in actual.keys() - expected.keys()]
            write_json(file, found.as_json())
    report(found, PROMPTS * GROUP * (1 + STALENESS.get(given.schedule, 0)) + EVAL_PROMPTS * EVAL_GROUP)


def report(found: Found, in_flight: int) -> None:
    """Print what was found; exit with status 1 where it is not as it should be."""
    print(f"kills: {dict(found.kills)}; in phases {dict(found.phases)}")
    print(f"{found.runs} runs of {found.starts} starts; processes left: {found.left or 'none'}")
    print(f"samples that were scored once more than without kills: {found.again} ({found.samples} a run)")
    failures = found.failures(in_flight)
    for failure in failures:
        print(failure)
    count = found.kills.total()
    if failures:
        print(f"FAILED: {count} kills, {len(failures)} failures")
        sys.exit(1)
    print(f"PASSED: {count} of {count} kills: every run as the undisturbed one, no process left, no sample lost")


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
    turns = [f"rollout.function={folder / 'turns.py'}:two_turns"] if schedule == "turns" else []
    return [*settings, *SCHEDULES[schedule], *turns]


def run_undisturbed(folder: Path, settings: Sequence[str], run: Path) -> Found:
    """Run without kills; return how long that took and what it scored."""
    begun = time.time()
    job = Job(folder, [*settings, f"run.folder={run}"])
    try:
        job.wait_until(lambda: last_phase(run, begun) != START)
        start_s = time.time() - begun
        assert job.wait() == 0, job.err
    finally:
        job.end()
    found = Found(start_s, time.time() - begun - start_s, take_scored(folder))
    print(f"undisturbed: start {found.start_s:.0f} s, training {found.training_s:.0f} s", flush=True)
    return found


def disturb(folder: Path, settings: list[str], run: Path, random: Random, found: Found, kills: int) -> None:
    """Start a run again and again until it is done, and kill meanwhile."""
    ends = False
    while not ends:
        job = Job(folder, settings, LAUNCH)
        found.starts += 1
        try:
            ends = kill_until_it_ends(job, run, random, found, kills)
            found.left += job.left()
        finally:
            job.end()


def kill_until_it_ends(job: Job, run: Path, random: Random, found: Found, kills: int) -> bool:
    """Kill processes of one job at random moments; return whether it ended well."""
    phase, started = "", time.time()
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
        target, phase = random.choice(TARGETS), last_phase(run, started)
        victims = processes(job, target)
        if not victims:
            continue
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
    """Return the processes of a job that may be killed as `target`."""
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
    """Return a command line; empty where the process has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def rank_of(process: psutil.Process) -> str | None:
    """Return the number of a rank; None for another process."""
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


def take_scored(folder: Path) -> int:
    """Return how many samples were scored since the last call."""
    sizes = (folder / SCORED).read_text().split()
    (folder / SCORED).unlink()
    return sum(map(int, sizes))


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
