"""Answer batch scripts: `python -m grpo_mp.cli.slurm_job COMMAND ...`.

COMMAND: show, folder, begin, has-steps-left, may-restart, crashed-check, failure, stopped-on-purpose.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from grpo_mp.checkpoint.run_state import METRICS, SETTINGS, saved_step
from grpo_mp.config import Settings, SftSettings, load_any_settings, show_settings
from grpo_mp.config.sections import EngineConfig, LayoutConfig
from grpo_mp.distributed.layout import describe_parallelism
from grpo_mp.rollout.placement import engine_placements
from grpo_mp.utils.errors import USER_STATUS, UserError, exit_with
from grpo_mp.utils.files import last_lines, read_json, write_atomically

NO = 1  # status of a question
BAD_NODES = "bad_nodes"  # file of an attempt: names, a line each, that the check found
FAULTY_NODES = "faulty_nodes"  # the same that training found
SAVED_STEP = "saved_step"  # file of an attempt: the step after which it begins
METRICS_BEFORE = "metrics_before"  # file of an attempt: the last lines of the run's metrics when it began
NUM_LAST_LINES = 15
STEP_LOGGED = re.compile(r'"step": (\d+)[,.}]')
CHECK_LOG, TRAIN_LOG = "srun_check.log", "srun.log"  # files of an attempt: what srun says of either step
TASK_ENDED = re.compile(r"error: (?P<node>\S+): tasks? (?P<rank>\d+)\S*: (?P<how>.+)")
NOT_STARTED = re.compile(r"error: Task launch for \S+ failed on node (?P<node>[^\s:]+): (?P<why>.+)")
NODE_FAILED = re.compile(r"error: Node failure on (?P<nodes>\S+)")
STEP_ABORTED = "Job step aborted"  # by srun itself, which then kills the tasks that are left


def main() -> None:
    """Run the command line."""
    args = _parser().parse_args()
    try:
        status = run_command(args)
    except UserError as error:
        exit_with(error)
    raise SystemExit(status)


def total_steps(settings: Settings | SftSettings) -> float:
    """Return the steps of a run; of one that counts epochs, those which its folder's settings say.

    Infinite where only the data say it: a job too many finds that all is done.
    """
    written = settings.run.folder / SETTINGS
    if settings.run.steps or not written.is_file():
        return settings.run.steps or inf
    before = load_any_settings(written)
    return before.run.steps if _epochs(before) == _epochs(settings) else inf


def _epochs(settings: Settings | SftSettings) -> tuple[str, float | None]:
    return ("run", settings.run.epochs) if isinstance(settings, Settings) else ("sft", settings.sft.epochs)


def run_command(args: argparse.Namespace) -> int:
    """Answer one question of a batch script; return the exit status."""
    if args.command == "failure":
        report_failure(args.attempt, args.nodes.split(","), args.per_node)
        return 0
    if args.command == "stopped-on-purpose":
        return 0 if first_failure(args.attempt).stopped else NO
    if args.command == "crashed-check":
        name_crashed_node(args.attempt)
        return 0
    settings = load_any_settings(args.config, args.overrides)
    if args.command == "has-steps-left":
        return 0 if total_steps(settings) > saved_step(settings.run.folder) else NO
    if args.command == "begin":
        begin_attempt(args.attempt, settings.run.folder, args.restarts)
        return 0
    if args.command == "may-restart":
        return 0 if may_restart(args.attempt, settings.run.folder) else NO
    if args.command == "folder":
        print(settings.run.folder)
        return 0
    engine = settings.engine if isinstance(settings, Settings) else None
    text = node_map(settings.layout, engine, args.nodes.split(","), args.per_node)
    if args.settings:
        print(show_settings(settings))
    print(text)
    if not (settings.model.path / "config.json").is_file():
        print(f"model: {settings.model.path} is not on this machine; layout and data are checked where it is")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="grpo_mp.cli.slurm_job", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    names = ("show", "begin", "may-restart", "folder", "has-steps-left")
    show, begin, restart, *others = (commands.add_parser(name) for name in names)
    for command in (begin, restart):
        command.add_argument("attempt", type=Path)
    begin.add_argument("--restarts", type=int, required=True, help="the most without a new checkpoint in between")
    for command in (show, begin, restart, *others):
        command.add_argument("config", type=Path)
        command.add_argument("overrides", nargs="*")
    show.add_argument("--settings", action="store_true", help="print the resolved settings first")
    for name in ("crashed-check", "stopped-on-purpose"):
        commands.add_parser(name).add_argument("attempt", type=Path)
    failure = commands.add_parser("failure")
    failure.add_argument("attempt", type=Path)
    for command in (show, failure):
        command.add_argument("--nodes", required=True, help="names, separated by commas")
        command.add_argument("--per-node", type=int, required=True, help="ranks on each")
    return parser


def last_metrics(folder: Path) -> str:
    """Return the last lines of a run's metrics, of which the last may be torn; empty without any."""
    return "\n".join(last_lines(folder / METRICS, 2))


def write_for_attempt(file: Path, text: str) -> None:
    """Write a file of an attempt's folder atomically."""
    try:
        write_atomically(file, text)
    except OSError as error:
        raise UserError(
            f"{file}: {error.strerror}: the job writes there: see that run.folder has room and is writable"
        ) from error


def begun_after(attempt: Path, present_step: int) -> int:
    """Return the step after which an attempt began; `present_step` where its file does not say, as after a crash."""
    try:
        return int((attempt / SAVED_STEP).read_text())
    except (OSError, ValueError):
        return present_step  # no progress is known of it


def begin_attempt(attempt: Path, run_folder: Path, restarts: int) -> None:
    """Make the folder of an attempt, with what `may_restart` compares."""
    step, job = saved_step(run_folder), attempt.name.split(".")[0]
    others = [begun_after(file.parent, step) for file in attempt.parent.glob(f"{job}.*/{SAVED_STEP}")]
    if others.count(step) > restarts:
        raise UserError(
            f"{others.count(step)} attempts of job {job} began after step {step}, and none came to its next checkpoint "
            f"(run.save_every): see {attempt.parent}; RESTARTS={restarts} are allowed"
        )
    write_for_attempt(attempt / METRICS_BEFORE, last_metrics(run_folder))
    write_for_attempt(attempt / SAVED_STEP, str(step))


def may_restart(attempt: Path, run_folder: Path) -> bool:
    """Tell whether an attempt failed for a reason that may pass: it was killed, or it had done a step.

    What fails before the first step fails again, and what stopped on purpose was not to go on, unless that was for a
    faulty node, which the next attempt leaves out. Lines of steps that an earlier attempt did after the last checkpoint
    count for nothing: they stay until the run resumes, which drops them.
    """
    failure = first_failure(attempt)
    if failure.stopped:
        return bool(failure.faulty_ranks)
    if failure.killed:
        return True
    metrics = last_metrics(run_folder)
    steps = STEP_LOGGED.findall(metrics)
    # A checkpoint that the run found to be damaged has been set aside, and it resumed from the one before.
    present_step = saved_step(run_folder)
    resumed_after = min(begun_after(attempt, present_step), present_step)
    return metrics != metrics_before(attempt) and bool(steps) and int(steps[-1]) > resumed_after


def metrics_before(attempt: Path) -> str | None:
    """Return the last lines of the run's metrics as they were when an attempt began; None where its file is missing."""
    try:
        return (attempt / METRICS_BEFORE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def name_crashed_node(attempt: Path) -> None:
    """Print and write the nodes on which srun could not start the check, else the one whose check crashed first.

    None where a user can mend it.
    """
    step = read_step_log(attempt / CHECK_LOG)
    bad = dict(step.lost)
    # Of a step that lost a node, srun kills the tasks on the others; of one that crashed, it ends them by SIGTERM.
    crashed = next((task for task in step.ended if task.how != "Terminated"), None)
    if not bad and crashed and not crashed.how.endswith(f"exit code {USER_STATUS}"):
        said = last_lines(attempt / f"check_{crashed.rank}.log", 1)
        bad[crashed.node] = f"its check crashed ({crashed.how}){': ' if said else ''}{''.join(said)}"
    for node, reason in bad.items():
        print(f"bad node {node}: {reason}")
    if bad:
        write_for_attempt(attempt / BAD_NODES, "\n".join(bad))


@dataclass(frozen=True)
class EndedTask:
    """Tasks of a node that ended together. `rank`: the first's. `how`: 'Killed', or 'Exited with exit code 1'."""

    node: str
    rank: int
    how: str

    @property
    def killed(self) -> bool:
        """Return whether a signal ended them."""
        return not self.how.startswith("Exited")


@dataclass(frozen=True)
class StepLog:
    """What srun says of a step. `lost`: node -> why. `ended`: in order; not those that srun's own abort of it ended."""

    lost: dict[str, str]
    ended: tuple[EndedTask, ...]
    aborted: bool


def read_step_log(log: Path) -> StepLog:
    """Read what srun wrote; of a missing file nothing happened."""
    lost, ended, aborted = dict[str, str](), list[EndedTask](), False
    # It holds what other programs print, too, in any encoding.
    for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
        if not_started := NOT_STARTED.search(line):
            lost.setdefault(not_started["node"], f"srun could not start its tasks ({not_started['why'].strip()})")
        elif failed := NODE_FAILED.search(line):
            lost.setdefault(failed["nodes"], "Slurm lost it")
        elif STEP_ABORTED in line:
            aborted = True
        elif (task := TASK_ENDED.search(line)) and not aborted:
            ended.append(EndedTask(task["node"], int(task["rank"]), task["how"]))
    return StepLog(lost, tuple(ended), aborted)


@dataclass(frozen=True)
class Failure:
    """The first failure of an attempt. `rank` is None where it is unknown."""

    rank: int | None
    reason: str
    last_lines: tuple[str, ...]  # of the rank's log
    killed: bool = False  # by a signal, or with its node
    stopped: bool = False  # on purpose, as by a guard
    faulty_ranks: tuple[int, ...] = ()  # whose nodes are at fault

    def text(self) -> str:
        """Return what to print first."""
        failed = "the job" if self.rank is None else f"rank {self.rank}"
        return "\n".join([f"{failed} failed: {self.reason}", *(f"  {line}" for line in self.last_lines)])


def report_failure(attempt: Path, nodes: Sequence[str], ranks_per_node: int) -> None:
    """Print the first failure of an attempt on these nodes, and write the names of those that are at fault."""
    failure = first_failure(attempt)
    print(failure.text())
    faulty = dict.fromkeys(nodes[rank // ranks_per_node] for rank in failure.faulty_ranks)
    for node in faulty:
        print(f"bad node {node}: its memory or network is faulty")
    if faulty:
        write_for_attempt(attempt / FAULTY_NODES, "\n".join(faulty))


def first_failure(attempt: Path) -> Failure:
    """Return a stop on purpose, else what srun saw first, a lost node or a signal's death, else a rank's oldest error.

    Else the end of srun's log. srun ends the other ranks after the first that fails: what they report then is only a
    consequence.
    """
    step, reported = read_step_log(attempt / TRAIN_LOG), reported_failures(attempt)
    if stopped := [failure for failure in reported if failure.stopped]:
        return stopped[0]
    end = last_lines(attempt / TRAIN_LOG, NUM_LAST_LINES)
    if step.lost:
        return Failure(None, "; ".join(f"node {node}: {why}" for node, why in step.lost.items()), end, killed=True)
    if step.ended and step.ended[0].killed:
        task = step.ended[0]
        return Failure(task.rank, f"{task.how} on {task.node}", _end_of_log(attempt, task.rank), killed=True)
    if step.aborted and not step.ended:
        return Failure(None, "srun was told to end its tasks:", end, killed=True)
    if reported:
        return reported[0]
    return Failure(None, f"no rank reported an error; last lines of {attempt / TRAIN_LOG}:", end)


def reported_failures(attempt: Path) -> list[Failure]:
    """Return what the error files of ranks say, the oldest first; not those that are torn, as on a full disk."""
    failures = []
    for file in sorted(attempt.glob("rank_*.error.json"), key=lambda file: (file.stat().st_mtime, file)):
        values = read_json(file)
        message, rank = values.get("message"), values.get("rank")
        if isinstance(message, dict) and "message" in message:
            end = () if rank is None else _end_of_log(attempt, rank)
            stopped, faulty = values.get("may_restart") is False, tuple(values.get("faulty_ranks", ()))
            failures.append(Failure(rank, str(message["message"]), end, stopped=stopped, faulty_ranks=faulty))
    return failures


def _end_of_log(attempt: Path, rank: int) -> tuple[str, ...]:
    return last_lines(attempt / f"rank_{rank}.log", NUM_LAST_LINES)


def node_map(layout: LayoutConfig, engine: EngineConfig | None, nodes: Sequence[str], ranks_per_node: int) -> str:
    """Return a line for the layout, then one for each node; `engine` None: the job has none."""
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
