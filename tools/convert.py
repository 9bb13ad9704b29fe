"""Alias: `python tools/convert.py ...` runs `grpo-mp convert ...`."""

import sys

from grpo_mp.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["convert", *sys.argv[1:]]))
