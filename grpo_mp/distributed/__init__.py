"""Ranks: coordinates, layout rules, process groups, rendezvous, ports.

Importing this package prepares the platform, so that its modules can import Megatron on any machine.

"""

from grpo_mp import platform

platform.prepare()
