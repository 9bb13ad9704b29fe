"""Submit a run to Slurm by the batch scripts of the folder launch/."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_mp.config import load_settings
from grpo_mp.errors import UserError

SCRIPTS, CONFIGS = Path("launch"), Path("configs")  # in the root of the repository


@dataclass(frozen=True)
class Submission:
    """A run to submit. `nodes` None: as many as the script asks for."""

    config: Path
    overrides: Sequence[str]
    nodes: int | None
    options: Sequence[str]  # for sbatch

    def script(self) -> list[str]:
        """Return the batch script with its arguments: the one made for this settings file, else the general one."""
        script = SCRIPTS / f"{self.config.stem}.sh"
        if self.config.absolute() == (CONFIGS / self.config.name).absolute() and script.is_file():
            return [str(script), *self.overrides]
        return [str(SCRIPTS / "slurm.sh"), str(self.config), *self.overrides]

    def command(self) -> list[str]:
        """Return the command line of sbatch."""
        nodes = [f"--nodes={self.nodes}"] if self.nodes else []
        return ["sbatch", *nodes, *self.options, *self.script()]


def submit(submission: Submission, dry_run: bool) -> int:
    """Submit a run, or show what would be submitted; return the exit status. Raises UserError."""
    if not (SCRIPTS / "common.sh").is_file():
        raise UserError(
            f"{SCRIPTS / 'common.sh'}: no such file: jobs start by the repository's scripts: change to its root, "
            "or start ranks on this machine with --ranks"
        )
    load_settings(submission.config, list(submission.overrides))  # a mistake is said now, not after the queue
    environment = {"VENV": sys.prefix} | os.environ
    if dry_run:
        print(shlex.join(submission.command()), flush=True)
        nodes = {"NODES": str(submission.nodes)} if submission.nodes else {}
        return subprocess.run(["bash", *submission.script(), "--dry-run"], env=environment | nodes).returncode
    try:
        return subprocess.run(submission.command(), env=environment).returncode
    except FileNotFoundError as error:
        raise UserError("sbatch is not on this machine: --dry-run shows the job, --ranks N starts it here") from error
