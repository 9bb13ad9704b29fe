"""Seconds from the command to the first step of a tiny model: `python -m tests.bench.first_step`.

`grpo-mp train` runs one step of a tiny DeepSeek-V3 by two ranks with two engines, several times; the first run, which
fills the caches of files and compiled modules, is left out. The times of begin and end are those of the first GENERATE
and TRAIN in the run's trace. CPU seconds are of all processes of the job, from its start to its exit: on a busy machine
compare them.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from grpo_mp.monitor.timeline import read_trace, trace_path
from tests.bench.quickstart_run import CONFIG, make_task

SIZES = ("rollout.prompts_per_step=4", "run.steps=1", "run.eval_every=0", "run.save_every=0", "run.export=false")
COLUMNS = ("to the first step", "to its end", "to the exit", "CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="measured runs, after one that is not")
    parser.add_argument("settings", nargs="*", help="section.key=value")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_task("--family", "deepseek_v3", "--out", str(folder / "model"), "--data", str(folder / "data"))
        rows = [time_run(folder, run, given.settings) for run in range(given.runs + 1)][1:]
    for column, values in zip(COLUMNS, zip(*rows, strict=True), strict=True):
        print(f"{column:18}{statistics.median(values):7.1f} s ({min(values):.1f} to {max(values):.1f})")


def time_run(folder: Path, run: int, settings: list[str]) -> tuple[float, float, float, float]:
    """Return seconds from the command to the begin and end of the first step and to the exit; CPU seconds."""
    out = folder / f"run_{run}"
    own = [f"run.folder={out}", f"model.path={folder / 'model'}", f"data.train={folder / 'data/train.jsonl'}"]
    command = [
        sys.executable,
        "-m",
        "grpo_mp",
        "train",
        CONFIG,
        "--ranks",
        "2",
        *own,
        "data.eval={}",
        *SIZES,
        *settings,
    ]
    earlier_s = cpu_seconds()
    began_s = time.time()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    ended_s = time.time()
    events = read_trace(trace_path(out, 0))
    begin_s = next(event["ts"] for event in events if event["name"] == "GENERATE" and event["ph"] == "B") / 1e6
    end_s = next(event["ts"] for event in events if event["name"] == "TRAIN" and event["ph"] == "E") / 1e6
    return begin_s - began_s, end_s - began_s, ended_s - began_s, cpu_seconds() - earlier_s


def cpu_seconds() -> float:
    """Return the CPU seconds of all ended children and their ended children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
