"""GRPO for large mixtures of experts: Megatron-Core trains, SGLang generates, in one SPMD program."""
