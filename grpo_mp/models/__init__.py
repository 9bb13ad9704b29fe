"""Model families: Megatron configs and the parameter mapping to Hugging Face."""
