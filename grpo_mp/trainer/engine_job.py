"""Job that generates without training, for evaluate.py and sample.py.

Engines load the weights of a Hugging Face folder themselves. For a run's checkpoint, the policy is built as for
training and sends its weights to the engines.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_mp import platform
from grpo_mp.checkpoint.run_state import MANIFEST, read_manifest
from grpo_mp.config import Settings, load_settings
from grpo_mp.rollout.rollout import engines_can_load_weights
from grpo_mp.trainer.context import Engines, open_engines
from grpo_mp.trainer.preflight import RunInputs
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.phases import Phase


@dataclass(frozen=True)
class EngineJob:
    """Settings and weights of a job that only generates; results go to `settings.run.folder`."""

    settings: Settings
    checkpoint: Path | None  # folder of a run's checkpoint; None: use `model.path`

    @property
    def name(self) -> Path:
        return self.checkpoint or self.settings.model.path

    @property
    def folder(self) -> Path:
        return self.settings.run.folder

    @property
    def needs_policy(self) -> bool:
        """Return whether a policy must send the weights, because engines cannot load them from the folder."""
        return self.checkpoint is not None or not engines_can_load_weights(self.settings.model, self.settings.engine)


def read_engine_job(args: argparse.Namespace, command: str) -> EngineJob:
    """Return the job that the parsed arguments describe; results go to --out, by default RUN/`command`/MODEL."""
    settings = load_settings(args.config, args.overrides, trains=False, dtype=platform.default_dtype())
    checkpoint, model = args.checkpoint, args.model or settings.model.path
    if checkpoint:
        if not (checkpoint / MANIFEST).is_file():
            raise UserError(f"{checkpoint}: incomplete checkpoint, {MANIFEST} is missing: give RUN/checkpoints/step_N")
        read_manifest(checkpoint)
    out = args.out or settings.run.folder / command / (checkpoint or model).absolute().name
    updates = {
        "run": settings.run.model_copy(update={"folder": out}),
        "model": settings.model.model_copy(update={"path": model}),
    }
    return EngineJob(settings.without_training().model_copy(update=updates), checkpoint)


@contextmanager
def start_engines(job: EngineJob, inputs: RunInputs, greeting: str) -> Iterator[Engines]:
    """Run engines with the job's weights while the body runs."""
    checkpoints = [job.checkpoint] if job.checkpoint else []
    with open_engines(job.settings, inputs, lambda: checkpoints, job.needs_policy, greeting) as engines:
        if job.needs_policy:
            with engines.phases.phase(Phase.SYNC):
                engines.recovery.update_weights(engines.resumed.state.optimizer_step)
            engines.recovery.check_engines()
        yield engines
