"""Tasks of Harbor (terminal-bench) as data rows of a Workspace."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_mp.utils.errors import UserError
from grpo_mp.utils.reading import has_column, read_column, refuse_unreadable

REWARDS = "/logs/verifier"  # folder in which tests/test.sh writes reward.txt or reward.json
# As Harbor does it: rewards that the policy wrote do not count, and reward.json takes precedence.
TEST_COMMAND = (
    f"mkdir -p {REWARDS}; rm -rf {REWARDS}/reward.json {REWARDS}/reward.txt; chmod +x /tests/test.sh; /tests/test.sh; "
    f"echo; {{ cat {REWARDS}/reward.json || cat {REWARDS}/reward.txt; }} 2>/dev/null | tr '\\n' ' '"
)
DEFAULT_TIMEOUT_S = 600.0  # of tests
WORKDIR = re.compile(r"^WORKDIR[ \t]+(\S+)", re.MULTILINE | re.IGNORECASE)
# Lines at the start of an instruction by which a benchmark finds its leaks, and empty lines: Harbor shows none of them.
CANARY = re.compile(r"(?:[ \t]*(?:<!--.*canary.*-->|#.*canary.*)[ \t\r]*(?:\n|\Z))*(?:[ \t\r]*\n)*", re.IGNORECASE)
NOT_SUPPORTED = ("steps", "environment.env", "environment.healthcheck", "environment.mcp_servers", "verifier.env")


def read_tasks(name: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each task folder below the folder `name`, or for `name` itself.

    Columns: `question`, the instruction; `task`, the folder's name; `image`, which has the name of the task unless
    task.toml names another; `folder`, in which commands run; `tests`, `test_command`, `test_timeout_s` and
    `reward_from_output`, see Workspace. Raises UserError for tasks of several containers, for Windows, or with settings
    that are NOT_SUPPORTED, and for files of tests that are no text.
    """
    root = Path(name)
    folders = sorted(file.parent for file in root.glob("**/task.toml"))
    if not folders:
        raise UserError(f"data.source=harbor: {name}: no folder with a task.toml: give the folder of Harbor's tasks")
    for folder in folders:
        with refuse_unreadable(folder):
            yield _row(folder)


def _row(folder: Path) -> dict[str, Any]:
    try:
        settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{folder / 'task.toml'}: no TOML: {error}") from error
    environment, verifier = (settings.get(section, {}) for section in ("environment", "verifier"))
    if wrong := [*filter(lambda name: has_column(settings, name) and read_column(settings, name), NOT_SUPPORTED)]:
        raise UserError(f"{folder}: {wrong[0]} of task.toml is not supported: leave the task out of the folder")
    if not (folder / "tests" / "test.sh").exists() or (folder / "environment" / "docker-compose.yaml").exists():
        raise UserError(f"{folder}: only tasks with tests/test.sh and one container are supported: leave the task out")
    if verifier.get("environment_mode") == "separate" or "environment" in verifier:
        raise UserError(
            f"{folder}: tests in a container of their own are not supported: set verifier.environment_mode to shared "
            "in task.toml if the task's image has what the tests need, or leave the task out"
        )
    dockerfile = folder / "environment" / "Dockerfile"
    workdirs = WORKDIR.findall(dockerfile.read_text(encoding="utf-8")) if dockerfile.exists() else []
    files = sorted(file for file in (folder / "tests").rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {
        "question": CANARY.sub("", (folder / "instruction.md").read_text(encoding="utf-8"), count=1),
        "task": folder.name,
        # An image of the task's own is built beforehand: docker build -t TASK TASK/environment
        "image": environment.get("docker_image") or folder.name,
        "folder": environment.get("workdir") or (workdirs[-1] if workdirs else "/"),
        "tests": {f"/tests/{file.relative_to(folder / 'tests')}": file.read_text(encoding="utf-8") for file in files},
        "test_command": TEST_COMMAND,
        "test_timeout_s": verifier.get("timeout_sec", DEFAULT_TIMEOUT_S),
        "reward_from_output": True,
    }
