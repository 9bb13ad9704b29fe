"""`python -m grpo_mp.launch ...` is `grpo-mp launch ...`."""

import sys

from grpo_mp.cli.main import main

raise SystemExit(main(["launch", *sys.argv[1:]]))
