"""Settings of a run: typed sections, checks across sections, and reading from YAML files and overrides."""

from grpo_mp.config.load import (
    check_settings,
    check_sft_settings,
    dump_settings,
    is_pipeline,
    load_any_settings,
    load_pipeline,
    load_settings,
    load_sft_settings,
    show_settings,
    training_module,
)
from grpo_mp.config.pipeline_settings import PipelineSettings
from grpo_mp.config.sections import CriticConfig
from grpo_mp.config.settings import Settings
from grpo_mp.config.sft_settings import SftSettings
from grpo_mp.config.trainer_settings import TrainerSettings

__all__ = [
    "CriticConfig",
    "PipelineSettings",
    "Settings",
    "SftSettings",
    "TrainerSettings",
    "check_settings",
    "check_sft_settings",
    "dump_settings",
    "is_pipeline",
    "load_any_settings",
    "load_pipeline",
    "load_settings",
    "load_sft_settings",
    "show_settings",
    "training_module",
]
