"""Submit a run to Slurm, from the root of the repository; --dry-run shows settings, nodes and commands.

configs/NAME.yaml runs by launch/NAME.sh, another settings file by launch/slurm.sh. Options that are not listed here go
to sbatch, as --partition=gpu. With --ranks the run starts on this machine, as by `grpo-mp train --ranks`.
"""

from collections.abc import Sequence

from grpo_mp.launch.submit import Submission, submit
from grpo_mp.options import Parser, positive, settings_parser


def main(arguments: Sequence[str]) -> int:
    """Run the command line, see the text above; return the exit status. Raises UserError."""
    local = Parser("grpo-mp launch", add_help=False)
    local.add_argument("--ranks", type=positive, help="start so many ranks on this machine, without Slurm")
    local.add_argument("--evaluate", action="store_true", help="with --ranks: evaluate instead of training")
    args, rest = local.parse_known_args(arguments)
    if args.ranks:
        from grpo_mp.launch.local import start_ranks  # torch is slow to import

        return start_ranks(args.ranks, rest, "grpo_mp.evaluate" if args.evaluate else "grpo_mp.train")
    parser = settings_parser("launch", __doc__, local)
    parser.add_argument("--nodes", type=positive, help="nodes to ask for (default: as the script does)")
    parser.add_argument("--dry-run", action="store_true", help="show what would be submitted")
    args, unknown = parser.parse_known_intermixed_args(arguments)  # unknown: also settings that follow such an option
    options = [argument for argument in unknown if argument.startswith("-")]
    overrides = [*args.overrides, *(argument for argument in unknown if argument not in options)]
    if args.evaluate:
        parser.error("--evaluate goes with --ranks: jobs of Slurm train")
    return submit(Submission(args.config, overrides, args.nodes, options), args.dry_run)
