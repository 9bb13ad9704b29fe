"""Loggers of experiment trackers. Each imports the tracker's package when it is made.

A resumed run continues the tracker's run. The tracker keeps the metrics of steps that the resume repeats.
"""

import html
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from grpo_mp.monitor.loggers import Logger
from grpo_mp.utils.files import write_atomically


class _WandbLike(Logger):
    """Base of the loggers of Weights & Biases and trackio, which share an API; subclasses set `_module` and `_run`."""

    _module: Any
    _run: Any

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(values, step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._log(step, dict(values))

    def histogram(self, step: int, name: str, values: torch.Tensor) -> None:
        self._log(step, {name: self._module.Histogram(values.numpy())})

    def close(self) -> None:
        self._run.finish()


class WandbLogger(_WandbLike):
    """Logs to Weights & Biases. `init`: arguments of `wandb.init`. WANDB_MODE=offline writes only `<run>/wandb/`."""

    def __init__(
        self, run_folder: Path, first_step: int, settings: Mapping[str, Any], project: str = "grpo_mp", **init: Any
    ) -> None:
        import wandb

        self._module = wandb
        number = _run_id(run_folder / "wandb_run_id", first_step)
        init = {"id": number, "name": run_folder.name, "dir": run_folder, "resume": "allow"} | init
        # The command line and the repository's address may hold passwords.
        private = wandb.Settings(console="off", disable_git=True, disable_code=True, x_disable_meta=True)
        self._run = wandb.init(project=project, config=dict(settings), settings=private, **init)
        self._run.define_metric("*", step_metric="step")  # wandb's own step cannot go back after a resume

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **values})

    def text(self, step: int, name: str, markdown: str) -> None:
        self._log(step, {name: self._module.Html(f"<pre>{html.escape(markdown)}</pre>")})


class TrackioLogger(_WandbLike):
    """Logs to trackio, by default on this machine. `init`: arguments of `trackio.init`, such as `space_id`."""

    def __init__(
        self, run_folder: Path, first_step: int, settings: Mapping[str, Any], project: str = "grpo_mp", **init: Any
    ) -> None:
        import trackio

        self._module = trackio
        name = f"{run_folder.name}-{_run_id(run_folder / 'trackio_run_id', first_step)}"
        init = {"name": name, "resume": "allow", "embed": False} | init
        self._run = trackio.init(project=project, config=dict(settings), **init)

    def text(self, step: int, name: str, markdown: str) -> None:
        self._log(step, {name: self._module.Markdown(markdown)})


class MlflowLogger(Logger):
    """Logs to MLflow at `tracking_uri` (default: MLFLOW_TRACKING_URI, else MLflow's default); drops histograms."""

    def __init__(
        self,
        run_folder: Path,
        first_step: int,
        settings: Mapping[str, Any],
        experiment: str = "grpo_mp",
        tracking_uri: str | None = None,
    ) -> None:
        import mlflow

        self._client = mlflow.MlflowClient(tracking_uri)
        self._metric = mlflow.entities.Metric
        file = run_folder / "mlflow_run_id"
        if not (first_step and file.exists()):
            found = self._client.get_experiment_by_name(experiment)
            number = found.experiment_id if found else self._client.create_experiment(experiment)
            write_atomically(file, self._client.create_run(number, run_name=run_folder.name).info.run_id)
        self._id = file.read_text()
        self._client.log_dict(self._id, dict(settings), "settings.json")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        names = {re.sub(r"[^\w./ -]", "_", name): float(value) for name, value in values.items()}
        self._client.log_batch(self._id, [self._metric(name, value, now, step) for name, value in names.items()])

    def text(self, step: int, name: str, markdown: str) -> None:
        self._client.log_text(self._id, markdown, f"{name}/step_{step:06d}.md")

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _run_id(file: Path, first_step: int) -> str:
    """Return the id of the tracker's run from `file`; a run that starts at step 0 gets a new id."""
    if not (first_step and file.exists()):
        write_atomically(file, uuid4().hex[:12])
    return file.read_text()
