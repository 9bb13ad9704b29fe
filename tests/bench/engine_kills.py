"""A run whose engines are killed at random moments: python -m tests.bench.engine_kills [--kills 20] [--schedule async]

Two ranks train the tests' tiny mixture; with one_step_off and async one trains and one has the engine. Engines that
share the devices sleep and wake as on a GPU (tests/e2e/sleeping_engines.py): phases here, too. An engine is killed at a
random moment of a random phase, the next one when the run has done a step since. Printed are the phase and the seconds
of that, and at the end how many kills the run survived, how many processes it left, and whether the steps trained on
the prompts in their order: each lost or doubled one would show.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from tests.conftest import make_tiny_run
from tests.e2e.jobs import LAUNCH, SLEEPING, Job, read_jsonl, spans

PHASES = ("GENERATE", "SCORE", "LOGPROB", "TRAIN", "SYNC", "CHECK", "EVAL")
MOVES = ("SLEEP", "WAKE")  # of engines that share the devices
GROUPS = 4  # of a step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--schedule", choices=["colocated", "one_step_off", "async"], default="colocated")
    parser.add_argument("--phases", nargs="*", choices=[*PHASES, *MOVES], help="those to kill in; default: all")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny = make_tiny_run(folder)
        run = folder / "run"
        own = [] if given.schedule == "colocated" else ["engine.ranks=1", "layout={}"]
        settings = [str(tiny.config), f"run.folder={run}", f"schedule={given.schedule}", *own, "run.steps=100000"]
        settings += ["run.eval_every=2", "run.export=false", "data.shuffle=false", f"engine.max_restarts={given.kills}"]
        job = Job(folder, settings, LAUNCH if own else SLEEPING)
        phases = given.phases or [*PHASES, *(() if own else MOVES)]
        try:
            for number in range(given.kills):
                _kill_one(job, run, number, phases, engines=1 if own else 2)
            job.signal(signal.SIGTERM, rank=0)
            status = job.wait()
            survived = job.err.count("it is started again")
            left = job.left()
            (done, wrong) = _count_steps(run, tiny.train)
            print(f"{survived} of {given.kills} survived; exit status {status}; processes left: {len(left)}")
            print(f"steps: {done}, {wrong} of them with lost or doubled groups")
            if survived < given.kills or status or left or wrong:
                sys.exit("the run did not survive all kills well")
        finally:
            job.end()


def _kill_one(job: Job, run: Path, number: int, phases: Sequence[str], engines: int) -> None:
    random = Random(number)
    phase = random.choice(phases)
    begun = time.monotonic()
    seen = {rank: spans(run, rank, phase) for rank in (0, 1)}
    job.wait_until(lambda: any(spans(run, rank, phase) > count for rank, count in seen.items()))
    time.sleep(random.uniform(0.0, 0.03 if phase in MOVES else 0.3))
    job.kill_engine(random.randrange(engines))
    job.wait_until(lambda: job.err.count("it is started again") > number)
    done = len(read_jsonl(run / "metrics.jsonl"))
    job.wait_until(lambda: len(read_jsonl(run / "metrics.jsonl")) > done + 1)
    print(f"{number + 1:3} {phase:8} {time.monotonic() - begun:5.1f} s", flush=True)


def _count_steps(run: Path, train: Path) -> tuple[int, int]:
    """Count the steps, and those that trained on other prompts than the next in the order of the file."""
    asked = [json.loads(line)["question"] for line in train.read_text().splitlines()]
    steps = [step for step in read_jsonl(run / "metrics.jsonl") if step["step"]]
    wrong = 0
    for step in steps:
        first = (int(step["step"]) - 1) * GROUPS
        expected = {asked[place % len(asked)] for place in range(first, first + GROUPS)}
        samples = read_jsonl(run / "samples" / f"step_{int(step['step']):06d}.jsonl")
        wrong += {sample["prompt"] for sample in samples} != expected or len(samples) != GROUPS * GROUPS
    return len(steps), wrong


if __name__ == "__main__":
    main()
