"""Commands for the batch scripts in launch/: `python -m grpo_mp.cli.slurm_job COMMAND ...`."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_mp.checkpoint.run_state import METRICS, SETTINGS, saved_step
from grpo_mp.config import Settings, load_any_settings, show_settings
from grpo_mp.config.sections import EngineConfig, LayoutConfig
from grpo_mp.distributed.layout import describe_parallelism
from grpo_mp.rollout.engine_layout import engine_placements
from grpo_mp.utils.errors import UserError, exit_with
from grpo_mp.utils.files import last_lines, read_json, write_atomically

NO = 1  # exit status for "no"
BAD_NODES = "bad_nodes"  # file of an attempt: names of the bad nodes, one per line
SAVED_STEP = "saved_step"  # file of an attempt: the step of the checkpoint that it resumes from
# Files of an attempt: messages of srun
CHECK_LOG = "srun_check.log"
TRAIN_LOG = "srun.log"
NUM_LAST_LINES = 15
STEP_LOGGED = re.compile(r'"step": (\d+)[,.}]')
TASK_ENDED = re.compile(r"error: (?P<node>\S+): tasks? (?P<rank>\d+)\S*: (?P<how>.+)")
NOT_STARTED = re.compile(r"error: Task launch for \S+ failed on node (?P<node>[^\s:]+): (?P<why>.+)")
NODE_FAILED = re.compile(r"error: Node failure on (?P<node>\S+)")
STEP_ABORTED = "Job step aborted"  # srun then kills the remaining tasks


def main() -> None:
    """Run the command line."""
    try:
        status = run_command(_parser().parse_args())
    except UserError as error:
        exit_with(error)
    raise SystemExit(status)


def _parser() -> argparse.ArgumentParser:
    run, attempt, size = (argparse.ArgumentParser(add_help=False) for _ in range(3))
    run.add_argument("config", type=Path)
    run.add_argument("overrides", nargs="*")
    attempt.add_argument("attempt", type=Path)
    size.add_argument("--nodes", required=True, help="names, separated by commas")
    size.add_argument("--per-node", type=int, required=True, help="ranks on each")

    parser = argparse.ArgumentParser(prog="grpo_mp.cli.slurm_job", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    show = commands.add_parser("show", parents=[size, run], help="print what runs on which node")
    show.add_argument("--settings", action="store_true", help="print the resolved settings first")
    commands.add_parser("folder", parents=[run], help="print the run folder")
    begin = commands.add_parser("begin", parents=[attempt, run], help="make the folder of an attempt")
    begin.add_argument("--restarts", type=int, required=True, help="the most without a new checkpoint in between")
    commands.add_parser("lost-nodes", parents=[attempt], help="name nodes on which the check could not start")
    failure = commands.add_parser("failure", parents=[attempt, run], help="print what failed first; 0: try again")
    failure.add_argument("--told-to-save", action="store_true", help="the time limit was near")
    commands.add_parser("has-steps-left", parents=[run], help="0: yes")
    return parser


def run_command(args: argparse.Namespace) -> int:
    """Run one command of a batch script; return the exit status."""
    if args.command == "lost-nodes":
        name_lost_nodes(args.attempt)
        return 0
    settings = load_any_settings(args.config, args.overrides)
    folder = settings.run.folder
    if args.command == "folder":
        print(folder)
    elif args.command == "begin":
        begin_attempt(args.attempt, folder, args.restarts)
    elif args.command == "has-steps-left":
        return 0 if steps_left(folder) else NO
    elif args.command == "failure":
        failure = first_failure(args.attempt)
        print(failure.text)
        return 0 if may_restart(failure, args.attempt, folder, args.told_to_save) else NO
    else:
        engine = settings.engine if isinstance(settings, Settings) else None
        ranks = node_map(settings.layout, engine, args.nodes.split(","), args.per_node)
        print(*([show_settings(settings)] if args.settings else []), ranks, sep="\n")
    return 0


def steps_left(run_folder: Path) -> int:
    """Return the steps after the last checkpoint, by the settings that the run has written, which count no epochs."""
    return max(0, load_any_settings(run_folder / SETTINGS).run.steps - saved_step(run_folder))


def begin_attempt(attempt: Path, run_folder: Path, restarts: int) -> None:
    """Make the folder of an attempt; refuse after more than `restarts` attempts from the same checkpoint."""
    step = saved_step(run_folder)
    job = attempt.name.split(".")[0]
    same = [file for file in attempt.parent.glob(f"{job}.*/{SAVED_STEP}") if file.read_text() == str(step)]
    if len(same) > restarts:
        raise UserError(
            f"{len(same)} attempts of job {job} began after step {step}, and none came to its next checkpoint "
            f"(run.save_every): see {attempt.parent}; RESTARTS={restarts} are allowed"
        )
    write_atomically(attempt / SAVED_STEP, str(step))


def name_lost_nodes(attempt: Path) -> None:
    """Print the nodes on which srun could not start the check, and write their names to BAD_NODES."""
    lost = read_step_log(attempt / CHECK_LOG).lost
    for node, reason in lost.items():
        print(f"bad node {node}: {reason}")
    if lost:
        (attempt / BAD_NODES).write_text("\n".join(lost))


@dataclass(frozen=True)
class StepLog:
    """Messages of srun about a job step. `lost`: node -> reason; `ended`: tasks that ended before srun aborted it."""

    lost: dict[str, str]
    ended: list[re.Match[str]]  # of TASK_ENDED
    aborted: bool


def read_step_log(log: Path) -> StepLog:
    """Parse the messages of srun in a log; a missing file gives an empty StepLog."""
    step = StepLog({}, [], False)
    # Other programs also print into the log, in any encoding.
    for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
        if not_started := NOT_STARTED.search(line):
            step.lost.setdefault(not_started["node"], f"srun could not start its tasks ({not_started['why'].strip()})")
        elif failed := NODE_FAILED.search(line):
            step.lost.setdefault(failed["node"], "Slurm lost it")
        elif STEP_ABORTED in line:
            step = replace(step, aborted=True)
        elif (task := TASK_ENDED.search(line)) and not step.aborted:
            step.ended.append(task)
    return step


@dataclass(frozen=True)
class Failure:
    """First failure of an attempt. `rank`: None if unknown."""

    rank: int | None
    reason: str
    last_lines: tuple[str, ...]  # end of the rank's log
    killed: bool = False  # ended by a signal, or lost with the node
    stopped: bool = False  # intentional stop, such as by a metric guard

    @property
    def text(self) -> str:
        failed = "the job" if self.rank is None else f"rank {self.rank}"
        return "\n".join([f"{failed} failed: {self.reason}", *(f"  {line}" for line in self.last_lines)])


def first_failure(attempt: Path) -> Failure:
    """Return the cause of an attempt's end: an intentional stop; else a lost node or killed rank; else an error.

    Of several errors the oldest counts, because srun ends the other ranks after the first failure.
    """
    step = read_step_log(attempt / TRAIN_LOG)
    reported = reported_failures(attempt)
    if stopped := [failure for failure in reported if failure.stopped]:
        return stopped[0]
    end = last_lines(attempt / TRAIN_LOG, NUM_LAST_LINES)
    if step.lost:
        return Failure(None, "; ".join(f"node {node}: {why}" for node, why in step.lost.items()), end, killed=True)
    if step.ended and not step.ended[0]["how"].startswith("Exited"):
        node, rank, how = step.ended[0].groups()
        return Failure(int(rank), f"{how} on {node}", _end_of_log(attempt, int(rank)), killed=True)
    if step.aborted and not step.ended:
        return Failure(None, "srun was told to end its tasks:", end, killed=True)
    if reported:
        return reported[0]
    return Failure(None, f"no rank reported an error; last lines of {attempt / TRAIN_LOG}:", end)


def reported_failures(attempt: Path) -> list[Failure]:
    """Return the failures in the error files of the ranks, oldest first; skip incomplete files."""
    failures = []
    for file in sorted(attempt.glob("rank_*.error.json"), key=lambda file: (file.stat().st_mtime, file)):
        values = read_json(file)
        message = values.get("message")
        rank = values.get("rank")
        if isinstance(message, dict) and "message" in message:
            end = () if rank is None else _end_of_log(attempt, rank)
            stopped = values.get("may_restart") is False
            failures.append(Failure(rank, str(message["message"]), end, stopped=stopped))
    return failures


def _end_of_log(attempt: Path, rank: int) -> tuple[str, ...]:
    return last_lines(attempt / f"rank_{rank}.log", NUM_LAST_LINES)


def may_restart(failure: Failure, attempt: Path, run_folder: Path, told_to_save: bool) -> bool:
    """Return whether a restart may help: a rank was killed, a step was done, or the time limit was near.

    `begin_attempt` limits the number of restarts.
    """
    if failure.stopped:
        return False
    steps = STEP_LOGGED.findall("\n".join(last_lines(run_folder / METRICS, 2)))
    has_done_a_step = bool(steps) and int(steps[-1]) > int((attempt / SAVED_STEP).read_text())
    return told_to_save or failure.killed or has_done_a_step


def node_map(layout: LayoutConfig, engine: EngineConfig | None, nodes: Sequence[str], ranks_per_node: int) -> str:
    """Return a line with the parallel layout, and a line for each node with its ranks and engines.

    `engine`: settings of the engines; None for a job without engines.
    """
    world_size = len(nodes) * ranks_per_node
    if (needed := layout.model_parallel) > world_size:
        raise UserError(
            f"layout: tensor x context x pipeline = {needed} needs {-(-needed // ranks_per_node)} "
            f"nodes of {ranks_per_node} ranks, the allocation has {len(nodes)}: ask for more with sbatch --nodes"
        )
    placements = engine_placements(engine, world_size, ranks_per_node) if engine else ()
    lines = [f"{world_size} ranks; layout: {describe_parallelism(layout, world_size)}"]
    for index, name in enumerate(nodes):
        ranks = range(index * ranks_per_node, (index + 1) * ranks_per_node)
        engines = [
            f"engine {placement.engine} (started by rank {placement.rank}"
            + (f", part {placement.node_rank} of {placement.nodes})" if placement.nodes > 1 else ")")
            for placement in placements
            if placement.rank in ranks
        ]
        lines.append(f"  {name}: ranks {ranks[0]}-{ranks[-1]}; {', '.join(engines) or 'no engine'}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
