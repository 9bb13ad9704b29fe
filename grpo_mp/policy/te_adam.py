"""What Megatron leaves out of TransformerEngine's Adam when it keeps its state in few bytes (precision-aware).

Of a float32 main weight that Adam may keep only the sixteen bits that its bfloat16 weight lacks: the remainder.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
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


@contextmanager
def state_in_place(parts: Sequence[MegatronOptimizer]) -> Iterator[None]:
    """Inside, Adam's state_dict is its state and no copy, and its load_state_dict sets groups and leaves the state.

    To save and to load Megatron asks for the whole state_dict several times and keeps only its groups; the state it
    reads and writes parameter by parameter. TransformerEngine's own would make float32 copies of all moments each time
    (8 bytes a parameter of bfloat16 moments), and cast the state to the dtype of the weights while it loads (6 more).
    """
    adams = [part.optimizer for part in parts]
    for adam in adams:
        adam.state_dict = partial(torch.optim.Optimizer.state_dict, adam)
        adam.load_state_dict = partial(_load_groups, adam)
    try:
        yield
    finally:
        for adam in adams:
            del adam.state_dict, adam.load_state_dict


def _load_groups(adam: Any, saved: dict[str, Any]) -> None:
    for group, loaded in zip(adam.param_groups, saved["param_groups"], strict=True):
        group |= {name: value for name, value in loaded.items() if name != "params"}


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
