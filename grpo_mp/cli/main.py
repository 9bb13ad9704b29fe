"""Run `grpo-mp COMMAND ...`. Only the module of this command is imported, since torch is slow to import."""

import sys
from collections.abc import Callable, Sequence
from pkgutil import resolve_name

import grpo_mp
from grpo_mp.utils.errors import INTERRUPT_STATUS, UserError, did_you_mean, exit_with
from grpo_mp.utils.reading import refuse_unreadable

# Command -> (function, summary in the help). The functions take the arguments and return the exit status.
COMMANDS = {
    "train": ("grpo_mp.cli.launch:train", "train a policy; --ranks N starts N ranks on this machine"),
    "sft": ("grpo_mp.cli.launch:sft", "fine-tune a policy on given chats; --ranks N starts N ranks on this machine"),
    "evaluate": ("grpo_mp.cli.launch:evaluate", "score a model or a checkpoint on held-out problems"),
    "sample": ("grpo_mp.cli.launch:sample", "answer prompts, keep the good answers, write them to Parquet"),
    "pipeline": ("grpo_mp.cli.pipeline:main", "run several stages one after another, each from what a former one made"),
    "launch": ("grpo_mp.cli.launch:main", "submit a run to Slurm, or show what would be submitted"),
    "plan": ("grpo_mp.cli.plan:main", "estimate memory and time of a run, without a GPU"),
    "report": ("grpo_mp.cli.report:main", "write one HTML page of a run, and print its warnings"),
    "watch": ("grpo_mp.cli.watch:main", "follow a run in the terminal"),
    "doctor": ("grpo_mp.cli.doctor:main", "say what is wrong with a machine, a model, or a run that hangs"),
    "convert": ("grpo_mp.cli.convert:main", "compare and convert checkpoints"),
}
HELP_FOOTER = "`grpo-mp COMMAND --help` shows its options, `grpo-mp --version` the version."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit status, or raise SystemExit with it."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    try:
        if command in ("-h", "--help"):
            print(usage())
            return 0
        if command == "--version":
            from importlib.metadata import version

            print(f"grpo-mp {version('grpo-mp')}")
            return 0
        with refuse_unreadable(command):
            return _function(command)(rest)
    except UserError as error:
        exit_with(error)
    except KeyboardInterrupt:
        sys.stderr.write("stopped by Ctrl-C\n")
        return INTERRUPT_STATUS


def usage() -> str:
    """Return the help text with the table of commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(["usage: grpo-mp COMMAND ...", "", str(grpo_mp.__doc__), "", *lines, "", HELP_FOOTER])


def _function(command: str) -> Callable[[Sequence[str]], int]:
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS)
        unknown = f"unknown command {command[:100]}{hint}" if command else "no command was given"
        raise UserError(f"{unknown}: `grpo-mp --help` lists them")
    function: Callable[[Sequence[str]], int] = resolve_name(COMMANDS[command][0])
    return function
