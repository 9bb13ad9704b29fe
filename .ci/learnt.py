"""Did a short run learn, and did it leave what it promises? `python .ci/learnt.py RUN --gain 0.1`."""

import argparse
import json
import sys
from pathlib import Path

METRIC = "reward/part/answer"  # share of right answers among the samples of a step
FIRST, LAST = 3, 5  # steps that are averaged
LEFT = ("settings.yaml", "trace.json", "final/config.json", "tensorboard", "checkpoints")


def main() -> None:
    """Exit status 1 where the share of right answers did not rise by the gain, or a file is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--gain", type=float, required=True, help="least rise of the share of right answers")
    wanted = parser.parse_args()
    if missing := [name for name in LEFT if not (wanted.run / name).exists()]:
        sys.exit(f"{wanted.run} lacks {', '.join(missing)}")
    values = [json.loads(line)[METRIC] for line in (wanted.run / "metrics.jsonl").read_text().splitlines()]
    before, after = _mean(values[:FIRST]), _mean(values[-LAST:])
    print(f"right answers: {before:.1%} in the first {FIRST} steps, {after:.1%} in the last {LAST} of {len(values)}")
    if after < before + wanted.gain:
        sys.exit(f"that is no rise by {wanted.gain:.0%}")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
