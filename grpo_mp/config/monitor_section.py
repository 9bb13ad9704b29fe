"""The section of metrics, logs, guards and time limits."""

from typing import Any

from pydantic import Field, field_validator, model_validator

from grpo_mp.config.registries import LOGGERS
from grpo_mp.utils.section import Section


class MetricGuard(Section):
    """Limits of a metric; outside them the run stops, and the last checkpoint stays."""

    min: float | None = Field(None, description="least value; null: none")
    max: float | None = Field(None, description="greatest value; null: none")
    max_drop: float | None = Field(
        None,
        ge=0,
        description="most that the mean of the last `steps` steps may be below the best such mean; null: any",
    )
    steps: int = Field(1, ge=1, description="steps in a row that must be outside, or that a mean is of")

    @model_validator(mode="after")
    def _has_a_limit(self) -> "MetricGuard":
        if self.min is None and self.max is None and self.max_drop is None:
            raise ValueError("set one of min, max and max_drop")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}: every value would be outside")
        return self


class MonitorConfig(Section):
    """Metrics, logs and time limits."""

    loggers: dict[str, dict[str, Any]] = Field(
        {"tensorboard": {}, "jsonl": {}},
        description="writers of the metrics: tensorboard, jsonl, wandb, mlflow, trackio, or your own 'file.py:Class', "
        "each with its arguments; also one name, or a list (TRL report_to, verl trainer.logger)",
    )
    report_every: int | None = Field(
        100,
        ge=0,
        description="steps between which RUN/report.html and RUN/trace.json are written anew, and at the end, also of "
        "a run that stops early (0: at the end only; null: never), by a process beside the run of the lowest priority; "
        "its failure is a warning",
    )
    check_replicas_every: int = Field(
        20,
        ge=0,
        description="steps between comparisons of the weights' checksums across data-parallel replicas; where they "
        "differ the run stops and names the rank (Megatron --check-weight-hash-across-dp-replicas-interval); 0: never",
    )
    poll_engines_s: float = Field(
        5.0, gt=0, description="seconds between two requests for an engine's load, for `grpo-mp watch` and the timeline"
    )
    guards: dict[str, MetricGuard] = Field(
        {},
        description="limits of metrics by name, as {train/entropy: {min: 0.02, steps: 5}, reward/mean: {max_drop: 0.3, "
        "steps: 10}}: a run whose reward or entropy collapses stops, and keeps the checkpoints from before",
    )
    phase_timeout_s: float = Field(
        3600.0, gt=0, description="time limit of a phase, and of a wait for other ranks, in seconds"
    )

    @field_validator("loggers", mode="before")
    @classmethod
    def _loggers_from_names(cls, value: Any) -> Any:
        names = [value] if isinstance(value, str) else value
        is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
        return {name: {} for name in names} if is_list else value

    @field_validator("loggers")
    @classmethod
    def _loggers_exist(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return {LOGGERS.check_name(name): arguments for name, arguments in value.items()}
