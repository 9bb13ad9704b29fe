"""Expert load: tokens that each layer's router sends to each expert during training."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn


class ExpertLoad:
    """Counts the tokens that this rank routes to each expert in training forwards, padding tokens included."""

    def __init__(self, models: Iterable[nn.Module], layers: int, experts: int) -> None:
        """Register hooks in the decoder layers' routers. `layers`, `experts`: of the full model; 0 experts: dense."""
        self._layers, self._experts = layers, experts
        self._counts: dict[int, Tensor] = {}  # layer number, from 1 -> counts [experts] on the device
        for module in (module for model in models for module in model.modules()):
            if isinstance(module, TopKRouter) and (module.layer_number or 0) <= layers:
                module.register_forward_hook(self._count)

    def take(self, group: dist.ProcessGroup) -> Tensor | None:
        """Return the counts summed over `group`, float64 [layers, experts], and reset them; None for a dense model."""
        if not self._experts:
            return None
        load = torch.zeros(self._layers, self._experts, dtype=torch.float64)
        for layer, count in self._counts.items():
            load[layer - 1] = count.double().cpu()
        self._counts.clear()
        dist.all_reduce(load, group=group)
        return load

    def _count(self, router: TopKRouter, inputs: object, output: tuple[Tensor, Tensor]) -> None:
        """Add the counts of one forward. `output`: probabilities and routing map, [tokens, experts] each.

        Forwards without gradients are not counted, as in Megatron's TopKRouter._apply_expert_bias. So logprob passes do
        not count, and a forward that is recomputed in the backward pass counts once.
        """
        if not torch.is_grad_enabled() or router.layer_number is None:
            return
        self._counts[router.layer_number] = self._counts.get(router.layer_number, 0) + output[1].detach().sum(0)


def max_load_ratio(load: Tensor) -> float | None:
    """Return the maximum of `load_ratios`; None if no token was routed."""
    ratios = load_ratios(load)
    return float(ratios.max()) if len(ratios) else None


def load_ratios(load: Tensor) -> Tensor:
    """Return each expert's load divided by the mean load of its layer, [layers with routed tokens, experts]."""
    routed = load[load.sum(1) > 0]
    return routed / routed.mean(1, keepdim=True)
