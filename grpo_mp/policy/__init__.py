"""The policy: a Megatron-Core model in any layout, with logprobs, optimizer, reference model and checkpoints.

Importing this package calls `platform.prepare`, so that its modules can import Megatron on machines without a GPU, too.
"""

from grpo_mp import platform

platform.prepare()
