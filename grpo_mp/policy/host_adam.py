"""Megatron's hybrid optimizer, which keeps Adam's state on the host and updates there: `optimizer.offload=host`.

It gets the bfloat16 weights and the gradients of the device, and has a torch AdamW for each of them: while one is
updated, gradients of the next ones are copied to the host. Nothing overlaps the backward pass: clipping needs the norm
of the whole gradient first. An update equals that of TransformerEngine's Adam but for rounding. What of it does not
work with this trainer, in megatron-core 0.16.1 and 0.19.2:

- The dtypes of the precision-aware optimizer: main weights and moments are float32; settings of others are refused.
  Gradients keep theirs: with `grad_reduce_in_fp32: false` they are clipped in bfloat16.
- `pin_cpu_params`: main weights are not pinned, so that each copy to the device would go through a buffer of the
  driver. Here they and the gradients are in one pinned buffer; torch converts their dtypes on the device.
- `dummy_step`, which creates the state before a load by a random update of the weights: `init_host_state` creates it.
- `load_state_dict`, which builds all parts anew from the weights: state is loaded where it is (checkpoint.py).
- `param_groups` name classes, which no checkpoint should: `adam_groups` leaves them out.
"""

import gc
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from grpo_mp.platform.pinned import PinnedBuffer

ADAM_FIELDS = {"lr", "betas", "eps", "weight_decay"}


def init_host_state(adam: HybridDeviceOptimizer) -> None:
    """Create moments and steps, so that they can be saved before the first update, and pin what is copied in one."""
    # Megatron builds the optimizer over whole weights, then over this rank's shards; the first one refers to itself.
    gc.collect()
    groups = [(part, group["params"]) for part in adam.sub_optimizers for group in part.param_groups]
    main_weights = [main_weight for _, params in groups for main_weight in params]
    adam.pinned = PinnedBuffer([*main_weights, *main_weights])  # lives as long as the optimizer
    tensors = iter(adam.pinned.tensors)
    for main_weight in main_weights:
        main_weight.data = next(tensors).copy_(main_weight.data)
    for main_weight in main_weights:
        main_weight.grad = adam.cpu_copy_map_grad[main_weight] = next(tensors)
    for part, params in groups:
        for main_weight in params:
            state = {name: torch.zeros_like(main_weight) for name in ("exp_avg", "exp_avg_sq")}
            # As after an update: the parts and the whole share the state, which names the main weight.
            part.state[main_weight] = state | {"step": torch.zeros(()), "master_param": main_weight}
            adam.state[adam.inner_param_to_orig_param[main_weight]] = part.state[main_weight]


def adam_groups(adam: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the param groups of a state_dict without the arguments of the hybrid optimizer itself."""
    if not isinstance(adam, HybridDeviceOptimizer):
        return groups
    dropped = adam.defaults.keys() - ADAM_FIELDS
    return [{name: value for name, value in group.items() if name not in dropped} for group in groups]
