"""What Megatron lacks for TransformerEngine's precision-aware Adam: initial state, state_dicts without copies.

That Adam may store of a float32 main weight only the 16 bits that the bfloat16 weight lacks: the remainder.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer


def init_state(part: MegatronOptimizer) -> None:
    """Create moments and main weights now, so that they can be saved before the first update."""
    adam = part.optimizer
    if not part.config.use_precision_aware_optimizer:
        part.init_state_fn(adam, part.config)
        return
    for group in adam.param_groups:  # Megatron's own function lacks an argument of this Adam
        for param in group["params"]:
            if not adam.state[param]:
                adam.initialize_state(param, stores_remainder(adam, param))


@contextmanager
def state_dict_without_copies(parts: Sequence[MegatronOptimizer]) -> Iterator[None]:
    """Let Adam's state_dict return its state uncopied, and its load_state_dict set only param groups, inside.

    For a save or load Megatron calls state_dict several times and uses only its param groups; it reads and writes the
    state by parameter. TransformerEngine's own state_dict would copy all moments to float32 each time (8 bytes per
    parameter with bfloat16 moments), its load_state_dict cast the state to the dtype of the weights (6 more).
    """

    def load_groups(adam: Any, saved: dict[str, Any]) -> None:
        for group, loaded in zip(adam.param_groups, saved["param_groups"], strict=True):
            group |= {name: value for name, value in loaded.items() if name != "params"}

    adams = [part.optimizer for part in parts]
    for adam in adams:
        adam.state_dict = partial(torch.optim.Optimizer.state_dict, adam)
        adam.load_state_dict = partial(load_groups, adam)
    try:
        yield
    finally:
        for adam in adams:
            del adam.state_dict, adam.load_state_dict


def stores_param_remainders(parts: list[MegatronOptimizer]) -> bool:
    """Return whether checkpoints hold remainders instead of main weights."""
    return any(
        stores_remainder(part.optimizer, param)
        for part in parts
        if part.config.use_precision_aware_optimizer
        for group in part.optimizer.param_groups
        for param in group["params"]
    )


def stores_remainder(adam: Any, param: torch.Tensor) -> bool:
    """Return whether TransformerEngine's Adam keeps a remainder of this parameter, not its main weight."""
    return bool(adam.store_param_remainders) and param.dtype == torch.bfloat16
