"""What batch scripts ask: `python -m grpo_mp.launch.job show | folder | unfinished | failure | ended ...`."""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_mp.checkpoint.run_state import latest_checkpoint, read_manifest
from grpo_mp.config import Settings, dump_settings, exit_with, load_settings
from grpo_mp.distributed.exit_marks import ranks_without_mark, silent_exit_message
from grpo_mp.distributed.layout import describe_parallelism
from grpo_mp.errors import UserError
from grpo_mp.files import last_lines
from grpo_mp.rollout.placement import engine_placements

FINISHED_STATUS = 1  # of `unfinished`
NUM_LAST_LINES = 15
SRUN_TASK_ENDED = re.compile(r"error: (?P<node>\S+): tasks? (?P<rank>\d+)\S*: (?P<how>.+)")


def main() -> None:
    """Run the command line."""
    args = _parser().parse_args()
    try:
        status: int = args.run(args)
    except UserError as error:
        exit_with(error)
    raise SystemExit(status)


def steps_left(settings: Settings) -> int:
    """Return how many steps the run's newest checkpoint lacks."""
    checkpoint = latest_checkpoint(settings.run.folder)
    return settings.run.steps - (read_manifest(checkpoint).step if checkpoint else 0)


def _show(args: argparse.Namespace) -> int:
    settings = load_settings(args.config, args.overrides)
    lines = [node_map(settings, args.nodes.split(","), args.per_node)]
    if not (settings.model.path / "config.json").is_file():
        lines.append(f"model: {settings.model.path} is not on this machine; layout and data are checked where it is")
    if args.settings:
        lines.insert(0, dump_settings(settings))
    print("\n".join(lines))
    return 0


def _folder(args: argparse.Namespace) -> int:
    print(load_settings(args.config, args.overrides).run.folder)
    return 0


def _unfinished(args: argparse.Namespace) -> int:
    return 0 if steps_left(load_settings(args.config, args.overrides)) > 0 else FINISHED_STATUS


def _failure(args: argparse.Namespace) -> int:
    print(first_failure(args.attempt).text())
    return 0


def _ended(args: argparse.Namespace) -> int:
    vanished = ranks_without_mark(args.attempt, args.ranks)
    if vanished:
        raise UserError(silent_exit_message(vanished[0]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="grpo_mp.launch.job", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, run in (("show", _show), ("folder", _folder), ("unfinished", _unfinished)):
        command = commands.add_parser(name)
        command.add_argument("config", type=Path)
        command.add_argument("overrides", nargs="*")
        command.set_defaults(run=run)
        if run is _show:
            command.add_argument("--nodes", required=True, help="names, separated by commas")
            command.add_argument("--per-node", type=int, required=True, help="ranks on each")
            command.add_argument("--settings", action="store_true", help="print the resolved settings first")
    failure = commands.add_parser("failure")
    failure.add_argument("attempt", type=Path)
    failure.set_defaults(run=_failure)
    ended = commands.add_parser("ended")
    ended.add_argument("attempt", type=Path)
    ended.add_argument("ranks", type=int)
    ended.set_defaults(run=_ended)
    return parser


@dataclass(frozen=True)
class Failure:
    """The first failure of an attempt. `rank` is None where it is unknown."""

    rank: int | None
    reason: str
    last_lines: tuple[str, ...]  # of the rank's log

    def text(self) -> str:
        """Return what to print first."""
        failed = "the job" if self.rank is None else f"rank {self.rank}"
        return "\n".join([f"{failed} failed: {self.reason}", *(f"  {line}" for line in self.last_lines)])


def first_failure(attempt: Path) -> Failure:
    """Return a signal's death that srun saw first, else the oldest error file of a rank, else the end of srun's log.

    srun ends the other ranks after the first that fails: what they report then is only a consequence.
    """
    srun_log = attempt / "srun.log"
    ended = SRUN_TASK_ENDED.search(srun_log.read_text()) if srun_log.exists() else None
    errors = [(file.stat().st_mtime, file) for file in attempt.glob("rank_*.error.json")]
    if ended and not ended["how"].startswith("Exited"):
        rank, reason = int(ended["rank"]), f"{ended['how']} on {ended['node']}"
    elif errors:
        _, file = min(errors)
        rank = int(file.name.split("_")[1].split(".")[0])
        reason = json.loads(file.read_text())["message"]["message"]
    else:
        reason = f"no rank said why; the end of {srun_log}:"
        return Failure(None, reason, last_lines(srun_log, NUM_LAST_LINES))
    return Failure(rank, reason, last_lines(attempt / f"rank_{rank}.log", NUM_LAST_LINES))


def node_map(settings: Settings, nodes: Sequence[str], ranks_per_node: int) -> str:
    """Return a line for the layout, then one for each node.

    Raises UserError where the job is too small for the settings.
    """
    world_size = len(nodes) * ranks_per_node
    layout = settings.layout
    model_parallel = layout.tensor * layout.context * layout.pipeline
    if model_parallel > world_size:
        raise UserError(
            f"layout: tensor x context x pipeline = {model_parallel} needs {-(-model_parallel // ranks_per_node)} "
            f"nodes of {ranks_per_node} ranks, the allocation has {len(nodes)}: ask for more with sbatch --nodes"
        )
    placements = engine_placements(world_size, ranks_per_node, settings.engine.gpus, settings.engine.count)
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
