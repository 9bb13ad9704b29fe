"""Ranks: coordinates, layout rules, process groups, rendezvous and finish markers.

Importing this package prepares the platform, so that Megatron may be imported by its modules on any machine.
"""

from grpo_mp import platform

platform.prepare()
