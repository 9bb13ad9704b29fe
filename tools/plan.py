"""`python tools/plan.py ...` is `grpo-mp plan ...`."""

import sys

from grpo_mp.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["plan", *sys.argv[1:]]))
