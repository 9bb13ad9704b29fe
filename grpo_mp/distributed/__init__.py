"""Ranks: their coordinates, the rules of layouts, process groups, and how ranks meet and end.

Importing this package prepares the platform, so that Megatron may be imported by its modules on any machine.
"""

from grpo_mp import platform

platform.prepare()
