"""Checkpoints as files: Hugging Face folders, Megatron's torch_dist, conversion between them, checksums."""
