"""Experiment trackers: those that are installed write what they get; no secret reaches any logger."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.monitor.loggers import PACKAGES, Logger, load_loggers, open_loggers, write_metrics
from grpo_mp.utils.errors import UserError

SETTINGS = {
    "engine": {"args": {"api_key": "SECRET 1"}},
    "reward": {"model": {"url": "https://me:SECRET@host/x"}},
    "rollout": {"function_args": {"hf_token": "SECRET 3", "max_tokens": 5}, "tools": ["https://SECRET@host"]},
    "headers": {"Authorization": "Bearer SECRET", "X-Api-Key": "SECRET", "Accept": "text/html"},
    "camel": {"apiKey": "SECRET", "clientSecret": "SECRET", "maxTokens": 5},
}
SHOWN = {
    "engine": {"args": {"api_key": None}},
    "reward": {"model": {"url": "https://host/x"}},
    "rollout": {"function_args": {"hf_token": None, "max_tokens": 5}, "tools": ["https://host"]},
    "headers": {"Authorization": None, "X-Api-Key": None, "Accept": "text/html"},
    "camel": {"apiKey": None, "clientSecret": None, "maxTokens": 5},
}


class Keeper(Logger):
    """Keeps the settings that it is given."""

    def __init__(self, run_folder: Path, first_step: int, settings: Mapping[str, Any]) -> None:
        self.settings = settings


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose values are in the settings."""
    monkeypatch.setenv("JUDGE_LOGIN", "SECRET of login")
    monkeypatch.setenv("SOME_TOKEN", "SECRET of variable")


def test_no_secret_reaches_a_logger(tmp_path: Path) -> None:
    (keeper,) = open_loggers([Keeper], tmp_path, 0, SETTINGS)
    assert isinstance(keeper, Keeper)
    assert keeper.settings == SHOWN


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_is_missing_is_named_at_the_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of the tracker's own files in the working directory is no package."""
    if find_spec(name):
        pytest.skip(f"{name} is installed")
    (tmp_path / name).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=f"^monitor.loggers: {name} is not installed: `pip install {name}`"):
        load_loggers({name: {}})


@pytest.mark.parametrize("name", PACKAGES)
def test_an_installed_tracker_writes_two_attempts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a server; all kinds of metrics are taken, one that is not finite among them."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported
    pytest.importorskip(name)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    args = {"mlflow": {"tracking_uri": f"file:{tmp_path / 'mlruns'}"}}.get(name, {})
    for first_step in (0, 2):
        loggers = open_loggers(load_loggers({name: args}), tmp_path, first_step, SETTINGS)
        scalars = {"reward/mean": 0.5, "train/loss": float("nan")}
        write_metrics(loggers, first_step, scalars, {"reward/values": [0.0, 1.5]}, {"rollout/samples": "**two**"})
        loggers[0].close()
    written = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert any(b"function_args" in content for content in written)
    assert not any(b"SECRET" in content for content in written)
