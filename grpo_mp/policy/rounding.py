"""Add noise of the size of rounding errors to the inputs of a model's linear layers."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# Largest relative error of one rounding; of INT4 with a scale for 32 weights, the u whose uniform noise in +-u is as
# large as the mean square error of normal weights: 9 % of them.
UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11, "fp8": 2.0**-4, "int4": 0.16}


@contextmanager
def rounding_noise(models: Iterable[nn.Module], precision: str, seed: int) -> Iterator[None]:
    """Inside the context, change the inputs of all linear layers by up to the rounding error of `precision`.

    Each value is multiplied by 1 + u, with u uniform in +-UNIT_ROUNDOFF[precision]. The outputs then differ as much as
    outputs of two equally correct implementations. `precision`: int4 means INT4 in routed experts, bfloat16 elsewhere.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def add_noise(unit: float, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *rest = inputs
        device = hidden.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        noise = torch.rand(hidden.shape, generator=generators[device], device=device).mul_(2).sub_(1)
        changed = torch.addcmul(hidden.float(), hidden.float(), noise, value=unit)
        return (changed.to(hidden.dtype), *rest)

    with ExitStack() as hooks:
        for model in models:
            for name, module in model.named_modules():
                if _is_linear(module):
                    here = "bfloat16" if precision == "int4" and ".experts." not in name else precision
                    noise = partial(add_noise, UNIT_ROUNDOFF[here])
                    hooks.enter_context(module.register_forward_pre_hook(noise))
        yield


def _is_linear(module: nn.Module) -> bool:
    is_other = isinstance(module, nn.Embedding) or any(
        part in type(module).__name__ for part in ("Router", "Embedding")
    )
    return not is_other and any(isinstance(each, Tensor) and each.dim() > 1 for each in module._parameters.values())
