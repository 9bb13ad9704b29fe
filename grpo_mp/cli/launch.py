"""Submit a run to Slurm, from the root of the repository; --dry-run shows settings, nodes and commands.

launch/NAME.sh runs configs/NAME.yaml; launch/slurm.sh runs any other settings file. Options that are not listed here,
such as --partition=gpu, are passed to sbatch.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from grpo_mp.utils.errors import UserError
from grpo_mp.utils.parsers import (
    Parser,
    evaluate_parser,
    positive_int,
    sample_parser,
    settings_parser,
    sft_parser,
    train_parser,
)
from grpo_mp.utils.processes import begin_slow_imports

# In the root of the repository
SCRIPTS = Path("launch")
CONFIGS = Path("configs")


def start(module: str, parser: Callable[[], Parser], arguments: Sequence[str]) -> int:
    """Start the ranks of a command; without --ranks or under another launcher, run the command in this process."""
    args = parser().parse_intermixed_args(arguments)
    if args.ranks is None or getattr(args, "dry_run", False) or "RANK" in os.environ:
        begin_slow_imports()
        import_module(module).main(arguments)
        return 0
    from grpo_mp.cli.local_launch import start_ranks  # torch is slow to import

    return start_ranks(args.ranks, arguments, module)


train = partial(start, "grpo_mp.train", train_parser)
sft = partial(start, "grpo_mp.sft", sft_parser)
evaluate = partial(start, "grpo_mp.evaluate", evaluate_parser)
sample = partial(start, "grpo_mp.sample", sample_parser)


def main(arguments: Sequence[str]) -> int:
    """Run `grpo-mp launch`; return the exit status."""
    parser = settings_parser("launch", __doc__)
    parser.add_argument("--nodes", type=positive_int, help="number of nodes (default: that of the script)")
    spares = "more nodes, which replace bad or lost ones; only the loss of the first node ends the job"
    parser.add_argument("--spares", type=int, default=0, help=spares)
    parser.add_argument("--dry-run", action="store_true", help="show what would be submitted")
    # `unknown` also contains the settings that follow an unknown option.
    args, unknown = parser.parse_known_intermixed_args(arguments)
    options = [argument for argument in unknown if argument.startswith("-")]
    script = _script_of(args.config, [*args.overrides, *(word for word in unknown if word not in options)])
    nodes = args.nodes or _nodes_of(script)
    environment = {"NODES": str(nodes), "SPARES": str(args.spares)}
    size = [f"--nodes={nodes + args.spares}", *(["--no-kill"] if args.spares else [])]
    return _submit(["sbatch", *size, *options, *script], ["bash", *script, "--dry-run"], environment, args.dry_run)


def _script_of(config: Path, overrides: list[str]) -> list[str]:
    """Check the settings; return the batch script for a settings file and the arguments of the script."""
    if not (SCRIPTS / "common.sh").is_file():
        raise UserError(
            f"{SCRIPTS / 'common.sh'}: no such file: jobs start by the repository's scripts: change to its root, "
            "or start ranks on this machine with `grpo-mp train --ranks N`"
        )
    from grpo_mp.config import load_any_settings  # pydantic is slow to import

    load_any_settings(config, overrides)
    own_script = SCRIPTS / f"{config.stem}.sh"
    if config.absolute() == (CONFIGS / config.name).absolute() and own_script.is_file():
        return [str(own_script), *overrides]
    return [str(SCRIPTS / "slurm.sh"), str(config), *overrides]


def _nodes_of(script: list[str]) -> int:
    (count,) = re.findall(r"^#SBATCH.* --nodes=(\d+)", Path(script[0]).read_text(), re.MULTILINE)
    return int(count)


def _submit(command: list[str], dry_command: list[str], variables: dict[str, str], dry_run: bool) -> int:
    environment = {"VENV": sys.prefix} | os.environ | variables
    if dry_run:
        print(shlex.join(command), flush=True)
        return subprocess.run(dry_command, env=environment).returncode
    try:
        return subprocess.run(command, env=environment).returncode
    except FileNotFoundError as error:
        raise UserError(
            "sbatch is not on this machine: --dry-run shows the job, `grpo-mp train --ranks N` starts it here"
        ) from error
