"""Checkpoint files: Hugging Face folders, Megatron's torch_dist format, a run's checkpoints, and their conversion.

Importing this package prepares the platform, so that Megatron may be imported by its modules on any machine.
"""

from grpo_mp import platform

platform.prepare()
