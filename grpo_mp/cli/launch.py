"""Submit a run to Slurm, from the root of the repository; --dry-run shows settings, nodes and commands.

configs/NAME.yaml runs by launch/NAME.sh, another settings file by launch/slurm.sh. Options that are not listed here go
to sbatch, as --partition=gpu. With --ranks the run starts on this machine, as by `grpo-mp train --ranks`.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from grpo_mp.errors import UserError
from grpo_mp.parsers import Parser, evaluate_parser, positive_int, settings_parser, train_parser

SCRIPTS, CONFIGS = Path("launch"), Path("configs")  # in the root of the repository


def train(arguments: Sequence[str]) -> int:
    """Run `grpo-mp train`; return the exit status."""
    args = train_parser().parse_intermixed_args(arguments)
    return _run("grpo_mp.train", None if args.dry_run else args.ranks, arguments)


def evaluate(arguments: Sequence[str]) -> int:
    """Run `grpo-mp evaluate`; return the exit status."""
    return _run("grpo_mp.evaluate", evaluate_parser().parse_intermixed_args(arguments).ranks, arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the command line, see the text above; return the exit status. Raises UserError."""
    local = Parser("grpo-mp launch", add_help=False)
    local.add_argument("--ranks", type=positive_int, help="number of ranks to start on this machine, without Slurm")
    local.add_argument("--evaluate", action="store_true", help="with --ranks: evaluate instead of training")
    args, rest = local.parse_known_args(arguments)
    if args.ranks:
        from grpo_mp.launch.local import start_ranks  # torch is slow to import

        return start_ranks(args.ranks, rest, "grpo_mp.evaluate" if args.evaluate else "grpo_mp.train")
    parser = settings_parser("launch", __doc__, local)
    parser.add_argument("--nodes", type=positive_int, help="number of nodes (default: that of the script)")
    parser.add_argument("--dry-run", action="store_true", help="show what would be submitted")
    args, unknown = parser.parse_known_intermixed_args(arguments)  # unknown: also settings that follow such an option
    options = [argument for argument in unknown if argument.startswith("-")]
    overrides = [*args.overrides, *(argument for argument in unknown if argument not in options)]
    if args.evaluate:
        parser.error("--evaluate goes with --ranks: jobs of Slurm train")
    return _submit(args.config, overrides, args.nodes, options, args.dry_run)


def _run(module: str, ranks: int | None, arguments: Sequence[str]) -> int:
    """Start `ranks` ranks of a module, or run it in this process where that is None or a launcher started it."""
    if ranks is None or "RANK" in os.environ:
        import_module(module).main(arguments)
        return 0
    from grpo_mp.launch.local import start_ranks  # torch is slow to import

    return start_ranks(ranks, arguments, module)


def _submit(config: Path, overrides: list[str], nodes: int | None, options: list[str], dry_run: bool) -> int:
    """Submit a run, or show what would be submitted; `options`: of sbatch. Raises UserError."""
    if not (SCRIPTS / "common.sh").is_file():
        raise UserError(
            f"{SCRIPTS / 'common.sh'}: no such file: jobs start by the repository's scripts: change to its root, "
            "or start ranks on this machine with --ranks"
        )
    from grpo_mp.config import load_settings  # pydantic is slow to import

    load_settings(config, overrides)  # a mistake is said now, not after the queue
    script = [str(SCRIPTS / "slurm.sh"), str(config), *overrides]
    own_script = SCRIPTS / f"{config.stem}.sh"
    if config.absolute() == (CONFIGS / config.name).absolute() and own_script.is_file():
        script = [str(own_script), *overrides]
    command = ["sbatch", *([f"--nodes={nodes}"] if nodes else []), *options, *script]
    environment = {"VENV": sys.prefix} | os.environ
    if dry_run:
        print(shlex.join(command), flush=True)
        environment |= {"NODES": str(nodes)} if nodes else {}
        return subprocess.run(["bash", *script, "--dry-run"], env=environment).returncode
    try:
        return subprocess.run(command, env=environment).returncode
    except FileNotFoundError as error:
        raise UserError("sbatch is not on this machine: --dry-run shows the job, --ranks N starts it here") from error
