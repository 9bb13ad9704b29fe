"""Run one rank as a Slurm task: `srun ... python -m grpo_mp.launch.task ATTEMPT CONFIG section.key=value ...`.

A rank that fails leaves its error in the folder ATTEMPT: see failure.py.
"""

import argparse
import os
import signal

from grpo_mp.config import exit_with
from grpo_mp.errors import UserError
from grpo_mp.launch.failure import error_file
from grpo_mp.launch.slurm import rank_environment
from grpo_mp.options import Parser


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # too early to be told to save; the run sets its own handler
    parser = Parser("python -m grpo_mp.launch.task", str(__doc__))
    parser.add_argument("attempt")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    try:
        args = parser.parse_args()
        os.environ.update(rank_environment(os.environ))
    except UserError as error:
        exit_with(error)
    os.environ["TORCHELASTIC_ERROR_FILE"] = error_file(args.attempt, os.environ["RANK"])
    from grpo_mp import train  # after the environment is complete

    train.main(args.command)


if __name__ == "__main__":
    main()
