"""The quickstart over several seeds, in one table: `python -m tests.bench.quickstart_seeds 0 1 2 --family deepseek_v3`.

Each seed makes its own data and cold start and trains with the quickstart's own settings, or with fewer `--steps`;
`--family` is a key of TINY_CONFIGS. Columns: accuracy on held-out prompts before and after (4 samples each at
temperature 1), the chance that one of the 4 is right, training seconds (first to last event of the trace), the largest
mean |engine - policy| logprob difference of any step and of any check after a sync, and the median share of step time
outside generate, logprob, train, sync and check.
"""

import argparse
import json
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.quickstart_run import train
from tests.e2e.jobs import read_jsonl
from tools.tiny.models import TINY_CONFIGS

REACH = {"after": 0.80, "seconds": 360.0, "mismatch": 1e-4, "overhead": 0.05}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--family", choices=sorted(TINY_CONFIGS), default="deepseek_v3")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--only-read", action="store_true", help="do not run, only read the runs")
    args = parser.parse_args()
    table = Table("seed", "before", "after", "pass@4 before", "after", "train s", "mismatch", "check", "overhead")
    for seed in args.seeds:
        folder = Path(f"runs/quickstart_{args.family}_seed{seed}")
        if not args.only_read:
            train(folder, seed, f"run.steps={args.steps}", family=args.family)
        table.add_row(str(seed), *row(folder))
    Console(width=120).print(table, f"reach: {REACH}")


def row(run: Path) -> list[str]:
    steps = read_jsonl(run / "metrics.jsonl")
    names = ("eval/arithmetic/accuracy", "eval/arithmetic/pass_at_4")
    evaluated = [[step[name] for step in steps if name in step] for name in names]
    return [
        *(f"{score:.1%}" for scores in evaluated for score in (scores[0], scores[-1])),
        f"{seconds(run):.0f}",
        f"{max(step.get('mismatch/logprob_abs_diff/mean', 0.0) for step in steps):.1e}",
        f"{max(step.get('sync/check/logprob_abs_diff/mean', 0.0) for step in steps):.1e}",
        f"{statistics.median(step['time/overhead_share'] for step in steps if 'time/overhead_share' in step):.1%}",
    ]


def seconds(run: Path) -> float:
    """From the first event of any rank to the last."""
    events = json.loads((run / "trace.json").read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    times = [event["ts"] for event in events if "ts" in event]
    return (max(times) - min(times)) / 1e6


if __name__ == "__main__":
    main()
