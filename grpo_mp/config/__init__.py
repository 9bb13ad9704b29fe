"""The settings: typed sections, the checks that span them, and reading them from YAML and overrides."""

from grpo_mp.config.load import check_settings, dump_settings, load_settings
from grpo_mp.config.settings import Settings

__all__ = ["Settings", "check_settings", "dump_settings", "load_settings"]
