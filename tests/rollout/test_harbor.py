"""Tasks of Harbor as our reader reads them, beside what the package itself reads of the same folders."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.rollout.harbor import read_tasks
from grpo_mp.utils.errors import UserError
from tests.rollout.test_workspace_tool import make_task

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("harbor") is None, reason="the package harbor is not installed"
)


def init(folder: Path, name: str, *options: str) -> Path:
    """A task that `harbor task init` makes."""
    from harbor.cli.main import app
    from typer.testing import CliRunner

    made = CliRunner().invoke(app, ["task", "init", f"org/{name}", "--tasks-dir", str(folder), *options])
    assert made.exit_code == 0, made.output
    return folder / name


def parsed(folder: Path) -> Any:
    from harbor.models.task.task import Task

    return Task(folder)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Tasks that our reader accepts."""
    settings = (
        '[agent]\ntimeout_sec = 9.0\n[environment]\ndocker_image = "registry/named:1"\nworkdir = "/srv"\nos = "LINUX"\n'
    )
    named = make_task(tmp_path / "more" / "named", settings)
    (named / "instruction.md").write_text("<!-- a CANARY of the benchmark -->\n# canary 17\n\n\n  Do it.\n# canary\n")
    bare = make_task(tmp_path / "bare")
    (bare / "task.toml").write_text("")
    (bare / "instruction.md").write_text("\n\nDo it.")
    shared = ("--verifier-mode", "shared")
    return [
        named,
        bare,
        make_task(tmp_path / "plain"),
        init(tmp_path, "made", *shared, "--include-canary-strings"),
        init(tmp_path, "small", *shared, "--no-pytest", "--no-package", "--no-solution"),
    ]


def test_both_read_the_same(folders: list[Path]) -> None:
    from harbor.models.trial.paths import EnvironmentPaths

    for folder in folders:
        (row,) = read_tasks(str(folder))
        task = parsed(folder)
        config = task.config
        assert row["question"] == task.instruction
        assert row["test_timeout_s"] == config.verifier.timeout_sec
        assert row["image"] == (config.environment.docker_image or folder.name)
        assert row["folder"] == (config.environment.workdir or "/app")
        chosen = task.file_filter.select(task.paths.tests_dir).relative_paths
        assert row["tests"].keys() == {f"/tests/{path}" for path in map(str, chosen)}
        places = EnvironmentPaths.for_os(config.environment.os)
        assert f"{places.tests_dir}/{task.paths.discovered_test_path_for(config.environment.os).name}" in row["tests"]
        assert f"cat {places.reward_json_path} || cat {places.reward_text_path}" in row["test_command"]


def test_what_the_reader_refuses_is_what_harbor_means_by_it(tmp_path: Path) -> None:
    from harbor.models.task.config import TaskOS
    from harbor.models.task.verifier_mode import VerifierEnvironmentMode, resolve_task_verifier_mode

    separate = init(tmp_path, "separate")  # as `init` makes it unless it is told otherwise
    assert resolve_task_verifier_mode(parsed(separate).config) == VerifierEnvironmentMode.SEPARATE
    with pytest.raises(UserError, match=r"set verifier\.environment_mode to shared"):
        list(read_tasks(str(separate)))
    steps = init(tmp_path, "steps", "--steps", "2", "--verifier-mode", "shared")
    assert parsed(steps).has_steps
    with pytest.raises(UserError, match=r"steps of task\.toml is not supported"):
        list(read_tasks(str(steps)))
    windows = make_task(tmp_path / "windows", '[environment]\nos = "windows"\n')
    (windows / "tests/test.sh").rename(windows / "tests/test.bat")
    assert parsed(windows).config.environment.os == TaskOS.WINDOWS
    with pytest.raises(UserError, match=r"only tasks with tests/test\.sh and one container"):
        list(read_tasks(str(windows)))
    secret = make_task(tmp_path / "secret", '[environment.env]\nKEY = "${KEY}"\n')
    assert parsed(secret).config.environment.env == {"KEY": "${KEY}"}
    with pytest.raises(UserError, match=r"environment\.env of task\.toml is not supported"):
        list(read_tasks(str(secret)))
