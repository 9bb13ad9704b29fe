"""The settings: typed sections, the checks that span them, and reading them from YAML and overrides."""

from grpo_mp.config.load import check_settings, dump_settings, exit_with, load_settings
from grpo_mp.config.sections import (
    DataConfig,
    EngineConfig,
    EvalSetConfig,
    LayoutConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    SyncConfig,
)
from grpo_mp.config.settings import Settings

__all__ = [
    "DataConfig",
    "EngineConfig",
    "EvalSetConfig",
    "LayoutConfig",
    "OptimizerConfig",
    "RolloutConfig",
    "RunConfig",
    "Settings",
    "SyncConfig",
    "check_settings",
    "dump_settings",
    "exit_with",
    "load_settings",
]
