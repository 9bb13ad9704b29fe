"""What batch scripts ask: `python -m grpo_mp.launch.job show | folder | unfinished | failure | ended ...`."""

import argparse
from pathlib import Path

from grpo_mp.checkpoint.run_state import latest_checkpoint, read_manifest
from grpo_mp.config import Settings, dump_settings, exit_with, load_settings
from grpo_mp.distributed.exit_marks import ranks_without_mark, silent_exit_message
from grpo_mp.errors import UserError
from grpo_mp.launch.failure import first_failure
from grpo_mp.launch.node_map import node_map

FINISHED_STATUS = 1  # of `unfinished`


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


if __name__ == "__main__":
    main()
