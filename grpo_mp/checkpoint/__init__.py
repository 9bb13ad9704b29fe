"""Checkpoint files: Hugging Face folders, Megatron's torch_dist format, a run's checkpoints, and their conversion."""
