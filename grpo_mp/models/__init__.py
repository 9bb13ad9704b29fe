"""Hugging Face checkpoints as Megatron sees them: configs, the parameter mapping, and the files."""
