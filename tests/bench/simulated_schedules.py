"""Simulated steps beside real ones: `python -m tests.bench.simulated_schedules [--steps 8] [--runs async ...]`.

Two cores, the tiny mixture and the lengths of compare_trl.py (16 to 512 tokens). Each run is under torchrun: colocated
(without and with partial rollouts) with two engines on two ranks that train; one_step_off and async with one rank that
trains and one with the engine. Of a run are measured: the seconds of logprobs, training, weight sync and scores (its
trace), and of a decode step by running sequences and cached tokens (its engines' logs; least squares). A prompt's token
takes an engine what a logprob takes the policy. The simulation gets these rates and the lengths, and plays who waits
for whom. Reach: a step within 15 % of the real one; else the exit status is 1.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime
from itertools import combinations
from pathlib import Path

import numpy as np

from grpo_mp.monitor.timeline import read_trace, trace_path
from grpo_mp.simulation.loop import simulate
from grpo_mp.simulation.scenario import Rates, Scenario, Schedule
from grpo_mp.utils.phases import Phase
from tests.bench import workload as w
from tests.bench.compare_trl import CORES, run

FAMILY = "qwen3_moe"
SLOTS, CONCURRENT_GROUPS = 128, 64  # defaults of a CPU engine, and of the settings
SETTLED = 2  # steps that are not timed
REACH = 0.15
# Schedule and max_staleness.
RUNS = {
    "colocated": (Schedule.COLOCATED, 0),
    "partial": (Schedule.COLOCATED, 1),
    "one_step_off": (Schedule.ONE_STEP_OFF, 1),
    "async": (Schedule.ASYNC, 1),
}
DECODE = re.compile(
    r"^\[(.{19})\] Decode batch, #running-req: (\d+), #token: (\d+),.* gen throughput \(token/s\): ([\d.]+)"
)


def decode_rates(logs: Iterable[Path], begin: float, end: float) -> tuple[float, float, float]:
    """Return the seconds of a decode step, and in it of a sequence and of a cached token, between two times.

    A line is of the steps since the one before: those that waited or had a prefill in between are left out. Other steps
    than the timed ones say nothing: a machine that is shared is not always as fast.
    """
    rows, seconds = [], []
    for log in logs:
        before = ""
        for line in log.read_text(errors="replace").splitlines():
            found, last = DECODE.search(line), DECODE.search(before)
            if (
                found
                and last
                and int(found[2]) <= int(last[2])
                and begin <= _epoch_s(last[1]) <= _epoch_s(found[1]) <= end
            ):
                batch = (int(found[2]) + int(last[2])) / 2
                rows.append((1.0, batch, (int(found[3]) + int(last[3])) / 2))
                seconds.append(batch / float(found[4]))
            before = line if found or "Prefill batch" in line else before
    return _fit(np.array(rows), np.array(seconds))


def _epoch_s(written: str) -> float:
    return datetime.fromisoformat(written).timestamp()


def _fit(rows: np.ndarray, values: np.ndarray) -> tuple[float, float, float]:
    """Return the factors of the columns, none below 0, by least squares: of three columns all subsets are tried."""
    best, best_error = np.zeros(3), float("inf")
    for columns in (columns for size in range(1, 4) for columns in combinations(range(3), size)):
        factors = np.zeros(3)
        factors[list(columns)] = np.linalg.lstsq(rows[:, columns], values, rcond=None)[0]
        error = float(np.square(rows @ factors - values).sum())
        if error < best_error and (factors >= 0).all():
            best, best_error = factors, error
    return float(best[0]), float(best[1]), float(best[2])


def phase_seconds(trace: Path) -> tuple[list[float], dict[str, float]]:
    """Return when the timed steps were trained, and the mean seconds of rank 0's phases in them; both in seconds.

    The second SYNC in a row computes what CHECK compares.
    """
    events = [event for event in read_trace(trace) if event["ph"] in "BE" and event["name"] in Phase.__members__]
    pairs = zip(events[::2], events[1::2], strict=True)
    spans = [(begin["name"], begin["ts"] / 1e6, end["ts"] / 1e6) for begin, end in pairs]
    trained = [end for name, _, end in spans if name == "TRAIN"][SETTLED - 1 :]
    totals, before = defaultdict[str, float](float), ""
    for name, begin, end in spans:
        if trained[0] <= begin and end <= trained[-1]:
            totals["CHECK" if name == before == "SYNC" else name] += end - begin
        before = name
    return trained, {name: total / (len(trained) - 1) for name, total in totals.items()}


def simulated_s(schedule: Schedule, staleness: int, lengths: w.Lengths, rates: Rates) -> float:
    """Simulate a step, many times: the order of the lengths is not that of the run."""
    colocated = schedule is Schedule.COLOCATED
    scenario = Scenario(
        schedule,
        rates,
        tuple(length for group in lengths.values() for length in group),
        engines=CORES if colocated else 1,
        engine_gpus=CORES if colocated else 1,
        trainer_gpus=CORES if colocated else 1,
        slots=SLOTS,
        concurrent_groups=CONCURRENT_GROUPS,
        prompts_per_step=w.PROMPTS,
        group_size=w.GROUP_SIZE,
        prompt_tokens=w.PROMPT_TOKENS,
        max_staleness=staleness,
        steps=64,
    )
    return simulate(scenario).step_s


def measured_rates(run_folder: Path, tokens: int, ranks: int) -> tuple[float, dict[str, float], Rates]:
    """Return seconds of a step, of its phases, and rates; `tokens` of a step, on so many ranks that train."""
    trained, phases = phase_seconds(trace_path(run_folder, 0))
    metrics = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()][SETTLED:]
    # With one_step_off its time is also that in which ranks wait for engines; after the last step nothing is generated.
    sync_s = min(line["sync/bytes"] / line["sync/bytes_per_s"] for line in metrics)
    logs = sorted(run_folder.glob("logs/engine_*.log"))
    step, sequence, cached = decode_rates(logs, trained[0], trained[-1])
    rates = Rates(
        step,
        (phases["LOGPROB"] + phases["TRAIN"]) / tokens,
        sequence_s=sequence,
        cached_token_s=cached,
        prefill_token_s=phases["LOGPROB"] * ranks / tokens,
        update_s=phases["SCORE"],
        sync_s=sync_s + phases["CHECK"],
    )
    return (trained[-1] - trained[0]) / (len(trained) - 1), phases, rates


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--folder", type=Path, help="keep the runs there; what is there is not run again")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        lengths = w.make_workload(folder, FAMILY, 0)
        print(w.describe(lengths))
        tokens = sum(sum(group) for group in lengths.values()) + w.PROMPTS * w.GROUP_SIZE * w.PROMPT_TOKENS
        worst = 0.0
        for name in given.runs:
            schedule, staleness = RUNS[name]
            run_folder, ranks = folder / name, CORES if schedule is Schedule.COLOCATED else 1
            if not (run_folder / "metrics.jsonl").exists():
                sizes = ["--steps", str(given.steps), "--schedule", schedule, "--staleness", str(staleness)]
                run("tests.bench.run_grpo_mp", [str(folder), str(run_folder), *sizes], CORES, 1)
            real, phases, rates = measured_rates(run_folder, tokens, ranks)
            simulated = simulated_s(schedule, staleness, lengths, rates)
            worst = max(worst, abs(simulated / real - 1))
            print(f"{name:12} real {real:6.2f} s, simulated {simulated:6.2f} s: {simulated / real - 1:+.1%}")
            decode = f"{rates.decode_step_s * 1e3:.2f} ms + {rates.sequence_s * 1e3:.3f} ms a sequence"
            print(f"    decode step {decode} + {rates.cached_token_s * 1e6:.2f} us a cached token; rank 0:")
            print("    " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in sorted(phases.items())), flush=True)
        if worst > REACH:
            sys.exit(f"a simulated step is {worst:.1%} off")


if __name__ == "__main__":
    main()
