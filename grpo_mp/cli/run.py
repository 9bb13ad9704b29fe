"""`grpo-mp train` and `grpo-mp evaluate`: start ranks on this machine, or be one."""

import os
from collections.abc import Sequence
from importlib import import_module

from grpo_mp.options import evaluate_parser, train_parser


def train(arguments: Sequence[str]) -> int:
    """Run `grpo-mp train`; return the exit status."""
    args = train_parser().parse_intermixed_args(arguments)
    return _run("grpo_mp.train", None if args.dry_run else args.ranks, arguments)


def evaluate(arguments: Sequence[str]) -> int:
    """Run `grpo-mp evaluate`; return the exit status."""
    return _run("grpo_mp.evaluate", evaluate_parser().parse_intermixed_args(arguments).ranks, arguments)


def _run(module: str, ranks: int | None, arguments: Sequence[str]) -> int:
    """Start `ranks` ranks of a module, or run it in this process where that is None or a launcher started it."""
    if ranks is None or "RANK" in os.environ:
        import_module(module).main(arguments)
        return 0
    from grpo_mp.launch.local import start_ranks  # torch is slow to import

    return start_ranks(ranks, arguments, module)
