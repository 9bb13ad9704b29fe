"""Share of step time outside generate, logprob, train, sync and check: `python -m tests.bench.overhead RUN_FOLDER`.

Reads metrics.jsonl of any finished run, such as the quickstart's. Reach: the median is under 0.05.
"""

import argparse
import json
import statistics
from pathlib import Path

SHARE, STEP = "time/overhead_share", "time/step_s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_folder", type=Path)
    lines = (parser.parse_args().run_folder / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if SHARE in line]
    for line in steps:
        print(f"step {line['step']:5}: {line[STEP]:8.2f} s, overhead {line[SHARE]:.4f}")
    print(f"median of {len(steps)} steps: {statistics.median(line[SHARE] for line in steps):.4f}")


if __name__ == "__main__":
    main()
