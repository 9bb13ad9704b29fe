"""Run one rank as a Slurm task: `srun ... python -m grpo_mp.cli.slurm_task ATTEMPT CONFIG section.key=value ...`.

A rank that fails writes its error to the folder ATTEMPT, where slurm_job reads it.
"""

import argparse
import gc
import os
import signal
import threading
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from grpo_mp.config import training_module
from grpo_mp.utils.errors import UserError, exit_with
from grpo_mp.utils.parsers import Parser


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE and LOCAL_* of an srun task. All nodes must have equally many tasks."""
    try:
        tasks = environment["SLURM_STEP_NUM_TASKS"]
        nodes = environment["SLURM_STEP_NUM_NODES"]
        return {
            "RANK": environment["SLURM_PROCID"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "WORLD_SIZE": tasks,
            "LOCAL_WORLD_SIZE": str(int(tasks) // int(nodes)),
        }
    except KeyError as error:
        raise UserError(f"{error} is not set: start this with srun, as launch/common.sh does") from error


def error_file(attempt: str, rank: str) -> str:
    """Return the path of the file to which torch writes the error of a failed rank."""
    return str(Path(attempt, f"rank_{rank}.error.json").absolute())


def _keep_pending(number: signal.Signals) -> None:
    """Block a signal until the run installs its handler."""
    # Library threads do not block the signal; the handler forwards it to the main thread, where it stays pending.
    signal.signal(number, lambda *_: signal.pthread_kill(threading.main_thread().ident or 0, number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})


def main() -> None:
    """Run the command line."""
    _keep_pending(signal.SIGUSR1)
    parser = Parser("python -m grpo_mp.cli.slurm_task", str(__doc__))
    parser.add_argument("attempt")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    try:
        args = parser.parse_args()
        os.environ.update(rank_environment(os.environ))
        module = training_module(Path(next((word for word in args.command if not word.startswith("-")), "")))
    except UserError as error:
        exit_with(error)
    os.environ["TORCHELASTIC_ERROR_FILE"] = error_file(args.attempt, os.environ["RANK"])
    gc.disable()  # it would take a fifth of the time of the imports; `main` enables it
    import_module(module).main(args.command)  # after the environment is complete


if __name__ == "__main__":
    main()
