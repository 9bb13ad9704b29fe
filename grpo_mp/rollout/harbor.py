"""Tasks of Harbor (terminal-bench) as data rows of a Workspace."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_mp.utils.errors import UserError
from grpo_mp.utils.reading import refuse_unreadable

REWARDS = "/logs/verifier"  # folder in which tests/test.sh writes reward.txt or reward.json
TEST_COMMAND = (
    f"mkdir -p {REWARDS}; bash /tests/test.sh; cat {REWARDS}/reward.json {REWARDS}/reward.txt 2>/dev/null | tail -n 1"
)
WORKDIR = re.compile(r"^WORKDIR[ \t]+(\S+)", re.MULTILINE | re.IGNORECASE)


def read_tasks(name: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each task folder below the folder `name`, or for `name` itself.

    Columns: `question`, the instruction; `task`, the folder's name; `image`, which has the name of
    the task unless task.toml names another; `folder`, in which commands
    run; `tests`, `test_command` and `reward_from_output`, see Workspace. Raises UserError for tasks of several
    steps, tests in a container of their own, and files of tests that are no text.
    """
    root = Path(name)
    folders = sorted(file.parent for file in root.glob("**/task.toml"))
    if not folders:
        raise UserError(f"data.source=harbor: {name}: no folder with a task.toml: give the folder of Harbor's tasks")
    for folder in folders:
        with refuse_unreadable(folder):
            yield _row(folder)


def _row(folder: Path) -> dict[str, Any]:
    settings = _settings(folder / "task.toml")
    verifier = settings.get("verifier", {})
    if settings.get("steps"):
        raise UserError(f"{folder}: a task of several steps is not supported: leave it out of the folder")
    if verifier.get("environment_mode") == "separate" or "environment" in verifier:
        raise UserError(
            f"{folder}: tests in a container of their own are not supported: set verifier.environment_mode to shared "
            "in task.toml if the task's image has what the tests need, or leave the task out"
        )
    dockerfile = folder / "environment" / "Dockerfile"
    workdirs = WORKDIR.findall(dockerfile.read_text(encoding="utf-8")) if dockerfile.exists() else []
    environment = settings.get("environment", {})
    files = sorted(file for file in (folder / "tests").rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {
        "question": (folder / "instruction.md").read_text(encoding="utf-8"),
        "task": folder.name,
        # An image of the task's own is built beforehand: docker build -t TASK TASK/environment
        "image": environment.get("docker_image") or folder.name,
        "folder": environment.get("workdir") or (workdirs[-1] if workdirs else "/"),
        "tests": {f"/tests/{file.relative_to(folder / 'tests')}": file.read_text(encoding="utf-8") for file in files},
        "test_command": TEST_COMMAND,
        "reward_from_output": True,
    }


def _settings(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file}: no TOML: {error}") from error
