"""The policy: a Megatron-Core model in any layout, its logprobs, its optimizer, its reference and checkpoints.

Importing this package prepares the platform, so that Megatron may be imported by its modules on any machine.
"""

from grpo_mp import platform

platform.prepare()
