"""Run torchrun on one node, as launch/torchrun_node.sh does: RANKS ATTEMPT CONFIG section.key=value ...

Slurm sends SIGUSR1, which asks the ranks to save, to every process of a step. Ranks inherit that it is blocked, so that
one which comes while they load stays pending, where the run looks for it; the agent hands on what came before them.
"""

import argparse
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from grpo_mp.utils.parsers import Parser

CHILDREN_EVERY_S = 0.5  # ranks that start later are told so soon


def keep_for_ranks(number: signal.Signals) -> None:
    """Let a signal to this process reach all its children, also those that start later.

    Call this before any library starts threads: those that do not block the signal would be ended by it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    signal.signal(number, signal.SIG_DFL)  # what is ignored never arrives
    threading.Thread(target=_hand_on, args=(number,), daemon=True).start()


def _hand_on(number: signal.Signals) -> None:
    signal.sigwait({number})
    told = set[psutil.Process]()
    while True:
        for child in set(psutil.Process().children()) - told:
            with suppress(psutil.NoSuchProcess):
                child.send_signal(number)
            told.add(child)
        time.sleep(CHILDREN_EVERY_S)


def agent_arguments(ranks: int, attempt: Path, module: str, environment: Mapping[str, str]) -> list[str]:
    """Return torchrun's arguments on a node. Raises KeyError where srun did not start this process."""
    return [
        f"--nnodes={environment['SLURM_STEP_NUM_NODES']}",
        f"--node-rank={environment['SLURM_NODEID']}",
        f"--nproc-per-node={ranks}",
        f"--master-addr={environment['MASTER_ADDR']}",
        f"--master-port={environment['MASTER_PORT']}",
        f"--log-dir={attempt / 'torchrun'}",
        "-m",
        module,
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; raises SystemExit where a rank fails."""
    keep_for_ranks(signal.SIGUSR1)
    from torch.distributed.run import main as run_agent  # its threads inherit what is blocked

    from grpo_mp.config import training_module
    from grpo_mp.utils.errors import UserError, exit_with

    parser = Parser("python -m grpo_mp.cli.torchrun_node", str(__doc__))
    parser.add_argument("ranks", type=int)
    parser.add_argument("attempt", type=Path)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs=argparse.REMAINDER)
    try:
        args = parser.parse_args(arguments)
        module = training_module(args.config)
    except UserError as error:
        exit_with(error)
    of_agent = agent_arguments(args.ranks, args.attempt, module, os.environ)
    run_agent([*of_agent, str(args.config), *args.overrides])


if __name__ == "__main__":
    main()
