"""Seconds in which every pair of layouts is planned and replayed: `python -m tests.bench.layout_pairs`.

Reach: 500 pairs and more in a minute of one core; exit status 1 where it takes longer.
"""

import sys
import time

from tests.weight_sync.test_plan import all_cases, check

REACH_S = 60.0


def main() -> None:
    """Check all pairs, as their test does, and print the seconds of this process."""
    cases, start = all_cases(), time.process_time()
    for case in cases:
        check(case)
    seconds = time.process_time() - start
    print(f"{len(cases)} pairs in {seconds:.1f} s of one core, {seconds / REACH_S:.2f} of the reach")
    sys.exit(seconds > REACH_S)


if __name__ == "__main__":
    main()
