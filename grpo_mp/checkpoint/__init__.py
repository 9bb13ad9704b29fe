"""Checkpoint files: Hugging Face folders, Megatron's torch_dist format, a run's checkpoints, and their conversion.

Importing this package calls `platform.prepare`, so that its modules can import Megatron on machines without a GPU, too.
"""

from grpo_mp import platform

platform.prepare()
