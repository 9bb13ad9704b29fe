"""AdamW with the interface and the state layout of apex's and TransformerEngine's FusedAdam."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw


class FusedAdam(torch.optim.Optimizer):
    """Adam on a CPU with `step` per param group, `exp_avg` and `exp_avg_sq` per parameter.

    Megatron's distributed optimizer cannot load a fully reshardable checkpoint into torch's own AdamW, which has a step
    per parameter.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        """Accept FusedAdam's arguments; `capturable`, for CUDA graphs, is ignored."""
        self.update = adamw if adam_w_mode else adam
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if param.grad is not None and param.numel()]
            for param in params:
                if not self.state[param]:
                    self.state[param] = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
            self.update(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                [],
                [torch.tensor(float(group["step"] - 1)) for _ in params],
                fused=True,
                amsgrad=False,
                maximize=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
            )
