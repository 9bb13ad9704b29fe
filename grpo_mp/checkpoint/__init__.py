"""Checkpoints as files: Hugging Face folders, Megatron's torch_dist, a run's own, and conversion between them.

Importing this package prepares the platform, so that Megatron may be imported by its modules on any machine.
"""

from grpo_mp import platform

platform.prepare()
