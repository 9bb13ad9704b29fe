"""Registries of data sources, rollout functions, loggers and sample filters.

Importing this module does not import torch, since the launcher checks names on a login node.
"""

from collections.abc import Callable
from typing import Any

from grpo_mp.utils.registry import LazyEntry, Registry

# DataSource of data/rows.py, RolloutFunction of rollout/protocol.py, MakeLogger of monitor/loggers.py, or SampleFilter
# of trainer/sampling/filters.py. Importing these types would import torch.
ExtensionFunction = Callable[..., Any]

DATA_SOURCES: Registry[ExtensionFunction] = Registry(
    "data source",
    {
        **{name: LazyEntry(f"grpo_mp.data.rows:read_{name}") for name in ("jsonl", "parquet", "datasets")},
        "verifiers": LazyEntry("grpo_mp.rollout.verifiers_env:read_taskset"),
        "harbor": LazyEntry("grpo_mp.rollout.harbor:read_tasks"),
    },
    parameters=("name",),
)
ROLLOUT_FUNCTIONS: Registry[ExtensionFunction] = Registry(
    "rollout function",
    {
        "call_tools": LazyEntry("grpo_mp.rollout.tool_loop:call_tools"),
        "openai_agent": LazyEntry("grpo_mp.rollout.openai_agent:OpenAIAgent"),
        "verifiers": LazyEntry("grpo_mp.rollout.verifiers_env:VerifiersRollout"),
    },
    parameters=("task", "policy"),
    makes=True,
)
LOGGERS: Registry[ExtensionFunction] = Registry(
    "logger",
    {
        "tensorboard": LazyEntry("grpo_mp.monitor.loggers:TensorBoardLogger"),
        "jsonl": LazyEntry("grpo_mp.monitor.loggers:JsonLinesLogger"),
        "wandb": LazyEntry("grpo_mp.monitor.trackers:WandbLogger"),
        "mlflow": LazyEntry("grpo_mp.monitor.trackers:MlflowLogger"),
        "trackio": LazyEntry("grpo_mp.monitor.trackers:TrackioLogger"),
    },
    parameters=("run_folder", "first_step", "settings"),
)
SAMPLE_FILTERS: Registry[ExtensionFunction] = Registry(
    "filter of samples",
    {
        name: LazyEntry(f"grpo_mp.trainer.sampling.filters:{name.title()}")
        for name in ("right", "best", "tokens", "complete", "distinct")
    },
    parameters=("prompt", "samples"),
    makes=True,
)
