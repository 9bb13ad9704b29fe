"""A long run in which an engine or a rank is killed every minute: python -m tests.bench.soak [--minutes 240]

The run of tests.bench.kills, without evaluations and exports. A job that ends is started again by the same command.
Before each kill, memory, threads, open files and sockets of its ranks are measured, and the files in shared memory and
of temporary folders. When the time is over the run is told to stop, and an undisturbed one of as many steps follows.
Printed are the means of the first and of the last third, and what metrics differ; the last line begins with PASSED or
FAILED, and the status says the same. `--minutes 3 --every 20` is the short form. With `--folder F` a soak that was
killed itself goes on there, in the same run, until all its parts are as long; so does the undisturbed run.
"""

import argparse
import json
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean

import psutil

from grpo_mp.utils.files import write_json
from tests.bench.kills import FOUND, SCHEDULES, children_of, end, evidence, make_inputs, open_folder, processes, rank_of
from tests.e2e.jobs import Job, read_jsonl, spans

TARGETS = ("rank 0", "rank 1", "engine", "engine's child")
SETTINGS = ("optimizer.lr_schedule=constant", "data.eval={}", "run.export_every=0", "run.export=false")
MOST_GROWTH = 1.15  # of the last third's mean over the first's
MANY = 10**6
Usage = Mapping[str, float]


@dataclass
class Soak:
    """What was measured and killed so far."""

    usages: list[Usage] = field(default_factory=list)
    kills: int = 0
    starts: int = 0
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0  # of jobs, until the last kill
    ended: bool = False  # the run was told to stop


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=240.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds from a step after a start to a kill")
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="partial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep all there, and go on with what is there")
    given = parser.parse_args(arguments)
    with open_folder(given.folder) as folder:
        settings = [*make_inputs(folder, given.schedule, MANY, MANY), *SETTINGS]
        run = folder / "run"
        undisturbed = folder / "undisturbed"
        file = folder / FOUND
        soak = Soak(**json.loads(file.read_text())) if file.exists() else Soak()
        if not soak.ended:
            random = Random(f"{given.seed}/{soak.starts}")
            disturb(folder, [*settings, f"run.folder={run}"], run, 60 * given.minutes, given.every, random, soak)
        steps = int(read_jsonl(run / "metrics.jsonl")[-1]["step"])
        # One more: the last step of a run launches no groups that the next one would take.
        job = Job(folder, [*settings, f"run.folder={undisturbed}", f"run.steps={steps + 1}"])
        try:
            assert job.wait(60 * given.minutes + 600) == 0, job.err
        finally:
            job.end()
        expected, actual = (of_steps(evidence(one), steps) for one in (undisturbed, run))
        different = [what for what in expected | actual if expected.get(what) != actual.get(what)]
        report(soak, steps, different)


def of_steps(found: Mapping[str, object], last: int) -> dict[str, object]:
    return {
        what: value
        for what, value in found.items()
        if what.startswith("step ") and int(what.removeprefix("step ").split(":")[0]) <= last
    }


def disturb(
    folder: Path, settings: Sequence[str], run: Path, seconds: float, every_s: float, random: Random, soak: Soak
) -> None:
    """Start the run again and again, kill a process of it each time, and tell it to stop after `seconds` of jobs.

    What was found is kept in `folder` after each kill.
    """
    while True:
        begun = time.monotonic()
        before = soak.seconds
        job = Job(folder, settings)
        done = spans(run, 0, "TRAIN")
        soak.starts += 1
        try:
            job.wait_until(lambda done=done: spans(run, 0, "TRAIN") > done + 1)
            while (left_s := seconds - before - (time.monotonic() - begun)) > 0:
                time.sleep(min(every_s, left_s))
                soak.usages.append(usage(job))
                if left_s > every_s and (victims := processes(job, random.choice(TARGETS))):
                    with suppress(psutil.NoSuchProcess):
                        random.choice(victims).kill()
                    soak.kills += 1
                    time.sleep(1.0)  # a launcher sees that its rank is gone
                soak.seconds = before + time.monotonic() - begun
                write_json(folder / FOUND, asdict(soak))
                if job.poll() is not None or len(ranks_of(job)) < 2:
                    job.wait()
                    break
            else:
                job.signal(signal.SIGUSR1)
                assert job.wait() == 0, job.err
                soak.ended = True
            soak.left += job.left()
            write_json(folder / FOUND, asdict(soak))
            if soak.ended:
                return
        finally:
            job.end()


def ranks_of(job: Job) -> list[psutil.Process]:
    """Return the ranks of a job; none where its launcher is gone."""
    with suppress(psutil.NoSuchProcess):
        return [child for child in children_of(psutil.Process(job.pid), recursive=False) if rank_of(child) is not None]
    return []


def usage(job: Job) -> Usage:
    found = dict.fromkeys(("memory", "threads", "files", "sockets"), 0.0)
    for rank in ranks_of(job):
        with suppress(psutil.NoSuchProcess), rank.oneshot():
            found["memory"] += rank.memory_info().rss
            found["threads"] += rank.num_threads()
            found["files"] += rank.num_fds()
            found["sockets"] += len(rank.net_connections())
    scratch = [*Path("/dev/shm").iterdir(), *Path(tempfile.gettempdir()).glob("grpo_mp[_-]*")]
    return found | {"scratch": float(len(scratch))}


def growth(usages: Sequence[Usage]) -> dict[str, tuple[float, float]]:
    third = max(1, len(usages) // 3)
    return {
        name: (fmean(u[name] for u in usages[:third]), fmean(u[name] for u in usages[-third:])) for name in usages[0]
    }


def report(soak: Soak, steps: int, different: Sequence[str]) -> None:
    print(f"{soak.kills} kills, {soak.starts} starts, {steps} steps; processes left: {soak.left or 'none'}")
    failures = [f"different: {what}" for what in different] + [f"left behind: {command}" for command in soak.left]
    for name, (first, last) in growth(soak.usages).items():
        print(f"{name}: {first:,.0f} in the first third, {last:,.0f} in the last")
        if last > MOST_GROWTH * first + 2:
            failures.append(f"{name} grows")
    end(failures, f"{soak.kills} kills in {steps} steps: metrics as undisturbed, nothing grows, no process left")


if __name__ == "__main__":
    main()
