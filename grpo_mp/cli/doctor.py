"""Say what is wrong: grpo-mp doctor WHAT ...

Prints findings, each with its evidence and what to do. The exit status is 1 where something is wrong.
"""

from collections.abc import Sequence
from pathlib import Path

from grpo_mp.doctor.findings import exit_status, render
from grpo_mp.parsers import Parser, non_negative

STUCK = """Say who waits for whom in a run that does not go on: grpo-mp doctor stuck RUN

Asks every rank on this host what it does, and the engines that they host; changes nothing. For a job of several
nodes, run it on each of them (srun --overlap), then once more on any.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command line, see the text above; return the exit status. Raises UserError."""
    parser = Parser("grpo-mp doctor", __doc__)
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT", parser_class=Parser)
    stuck = commands.add_parser("stuck", help="a run that does not go on: who waits for whom", description=STUCK)
    stuck.add_argument("run", type=Path, metavar="RUN", help="run.folder of a run that is going on")
    limit = "seconds in which a rank must answer (default: 10)"
    stuck.add_argument("--timeout-s", type=non_negative, default=10.0, metavar="S", help=limit)
    over = "report waits longer than this many seconds (default: 5)"
    stuck.add_argument("--over-s", type=non_negative, default=5.0, metavar="S", help=over)
    args = parser.parse_args(arguments)
    return diagnose_stuck(args.run, args.timeout_s, args.over_s)


def diagnose_stuck(run_folder: Path, timeout_s: float, over_s: float) -> int:
    """Print what the ranks of a run wait for; return the exit status."""
    from grpo_mp.doctor.processes import ask_ranks
    from grpo_mp.doctor.stuck import diagnose, shown_engines

    dumps, silent, engines = ask_ranks(run_folder, timeout_s)
    findings = diagnose(dumps, silent, over_s)
    print(render([*findings, *shown_engines(engines)]))
    return exit_status(findings)
