"""What Megatron leaves out of TransformerEngine's Adam when it keeps its state in few bytes (precision-aware).

Of a float32 main weight that Adam may keep only the sixteen bits that its bfloat16 weight lacks: the remainder.
"""

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer

MAIN = "param"  # Megatron's name of a main weight in checkpoints


def init_state(part: MegatronOptimizer) -> None:
    """Make moments and main weights now: else there is nothing to save before the first update."""
    adam = part.optimizer
    if not part.config.use_precision_aware_optimizer:
        part.init_state_fn(adam, part.config)
        return
    for group in adam.param_groups:  # Megatron's own function lacks an argument that this Adam wants
        for param in group["params"]:
            if not adam.state[param]:
                adam.initialize_state(param, _keeps_remainder(adam, param))


def keeps_remainders(parts: list[MegatronOptimizer]) -> bool:
    """Whether checkpoints hold remainders instead of main weights."""
    return any(
        _keeps_remainder(part.optimizer, param)
        for part in parts
        if part.config.use_precision_aware_optimizer
        for group in part.optimizer.param_groups
        for param in group["params"]
    )


def as_remainders(param_state: dict[int, dict[str, torch.Tensor]]) -> dict[int, dict[str, torch.Tensor]]:
    """Read main weights as the integers that they are: a checkpoint has all of a state in float32, exactly."""
    return {
        number: {name: value.to(torch.int16) if name == MAIN else value for name, value in state.items()}
        for number, state in param_state.items()
    }


def _keeps_remainder(adam: Any, param: torch.Tensor) -> bool:
    return bool(adam.store_param_remainders) and param.dtype == torch.bfloat16
