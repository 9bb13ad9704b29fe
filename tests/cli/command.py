"""Run `grpo-mp` in this process."""

from dataclasses import dataclass

import pytest

from grpo_mp.cli.main import main


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    status: int
    out: str
    err: str


def run_command(capsys: pytest.CaptureFixture[str], *arguments: object) -> Result:
    """Run a command line; nothing that was printed before counts."""
    capsys.readouterr()
    try:
        status = main([*map(str, arguments)])
    except SystemExit as error:
        status = int(error.code or 0)
    printed = capsys.readouterr()
    return Result(status, printed.out, printed.err)
