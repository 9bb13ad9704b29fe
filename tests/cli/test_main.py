"""The command `grpo-mp`: its table of commands, what it says of mistakes, and what it imports for that."""

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from grpo_mp.cli.main import COMMANDS, main
from tests.cli.command import run_command

ROOT = Path(__file__).parents[2]
IMPORTS = """
import sys
from grpo_mp.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print(*sys.modules, sep="\\n", file=sys.stderr)
"""


def test_script_of_the_package_is_this_command() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert EntryPoint("grpo-mp", scripts["grpo-mp"], "console_scripts").load() is main


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_command(capsys, "--help")
    assert result.status == 0
    assert all(f"\n  {name} " in result.out for name in COMMANDS)
    assert run_command(capsys, "-h") == result


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_own_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_command(capsys, command, "--help")
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith(f"usage: grpo-mp {command} ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no command was given: `grpo-mp --help` lists them"),
        (["trian"], "unknown command trian (did you mean train?): `grpo-mp --help` lists them"),
        (
            ["train", "x.yaml", "--ranks", "0"],
            "argument --ranks: expected a positive integer, got 0: see `grpo-mp train --help`",
        ),
        (["plan", "x.yaml"], "x.yaml: No such file or directory: give an existing file"),
        (["report", "no_such"], "no_such: no run folder, it has no settings.yaml: give the run.folder of a run"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_command(capsys, *arguments)
    assert (result.status, result.out, result.err) == (2, "", f"error: {sentence}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["trian"],
        ["train", "--help"],
        ["plan", "--help"],
        ["launch", "none.yaml"],
        ["report", "none"],
    ],
    ids=" ".join,
)
def test_quick_answers_import_no_torch(arguments: list[str]) -> None:
    process = subprocess.run([sys.executable, "-c", IMPORTS, *arguments], capture_output=True, text=True, check=True)
    modules = set(process.stderr.splitlines())
    assert "grpo_mp.cli.main" in modules
    assert not modules & {"torch", "transformers", "megatron", "sglang"}
