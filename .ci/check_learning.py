"""Did a short run learn, and did it leave what it promises? `python .ci/check_learning.py RUN --gain 0.1`."""

import argparse
import json
import sys
from pathlib import Path

METRIC = "eval/arithmetic/accuracy"  # share of held-out problems answered right
LEFT = ("settings.yaml", "trace.json", "final/config.json", "tensorboard", "checkpoints")


def main() -> None:
    """Exit status 1 where the accuracy did not rise by the gain, or a file is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--gain", type=float, required=True, help="least rise of the accuracy on held-out problems")
    args = parser.parse_args()
    if missing := [name for name in LEFT if not (args.run / name).exists()]:
        sys.exit(f"{args.run} lacks {', '.join(missing)}")
    lines = map(json.loads, (args.run / "metrics.jsonl").read_text().splitlines())
    (first, before), *_, (last, after) = [(line["step"], line[METRIC]) for line in lines if METRIC in line]
    print(f"held-out problems answered right: {before:.1%} at step {first}, {after:.1%} at step {last}")
    if after < before + args.gain:
        sys.exit(f"that is no rise by {args.gain:.0%}")


if __name__ == "__main__":
    main()
