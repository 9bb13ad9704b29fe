"""Routing replay: routers use experts that were chosen earlier, by the engine (R3) or in the old-logprob pass (R2).

A Megatron router passes its scores to its `router_replay`. Unlike Megatron's RouterReplay, LayerReplay replays only the
rows with recorded experts, and finds out which forwards are recomputed. If the router itself chooses the
recorded experts of a row, the router's order remains, so the rounding does not change. The weights of the experts
always come from the router's scores and carry its gradient.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from grpo_mp import platform
from grpo_mp.policy.deepseek import GroupLimitedTopk, Topk
from grpo_mp.policy.sparse_attention import store_keys
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import MicroBatch, ReplayedChoices, copy_to, expert_id_bytes

Target = tuple[Tensor, Tensor]  # rows [n] of a micro-batch, and the experts [n, top-k] to replay there


@dataclass
class LayerReplay:
    """Replays experts in one router, as its `router_replay`, and records the router's own choices."""

    layer: int  # number of the layer, from 0
    ranking: GroupLimitedTopk | None  # the router's own top-k; None: Megatron's
    target: Target | None = None  # experts of the current micro-batch; None: the router chooses
    is_training: bool = False  # a backward pass follows; it recomputes forwards that ran without gradients
    recomputed: deque[Target | None] = field(default_factory=deque)  # targets of forwards to recompute, oldest first
    chosen: Tensor | None = None  # experts that the router itself chose in the last forward, [T, top-k]
    differing: Tensor | int = 0  # number of experts replayed in training that the router would not have chosen
    replayed: int = 0  # number of experts replayed in training

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int, group_topk: int, default_compute_topk: Topk
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and the indices of each row's experts, [T, top-k] each. `scores`: [T, experts]."""
        if self.ranking:
            values, chosen = self.ranking.get_replay_topk(
                scores, topk, num_groups=num_groups, group_topk=group_topk, default_compute_topk=default_compute_topk
            )
        else:
            values, chosen = default_compute_topk(scores, topk, num_groups, group_topk)
        self.chosen = chosen
        is_recomputed = torch.is_grad_enabled() and len(self.recomputed) > 0
        target = self.recomputed.popleft() if is_recomputed else self.target
        if self.is_training and not torch.is_grad_enabled():
            self.recomputed.append(target)
        if target is None:
            return values, chosen
        rows = target[0]
        experts = target[1].to(chosen.dtype)
        own = chosen[rows]
        found = (experts[:, :, None] == own[:, None, :]).any(2)
        if self.is_training and not is_recomputed:
            self.differing += (~found).sum()
            self.replayed += found.numel()
        merged = chosen.index_copy(0, rows, own.where(found.all(1, keepdim=True), experts))
        return scores.gather(1, merged), merged


class RoutingReplay:
    """Routing replay of all routers, and of all indexers, on this rank."""

    def __init__(self, chunks: Sequence[nn.Module], num_experts: int, with_keys: bool = False) -> None:
        """Set up the replay in `chunks`. `with_keys`: and of the keys of sparse attention."""
        self.key_layers = store_keys(chunks) if with_keys else ()  # layers with an indexer, from 0, ascending
        self._by_chunk = {id(chunk): [_replay_in(router) for router in decoder_routers(chunk)] for chunk in chunks}
        self._replays = sorted((replay for of in self._by_chunk.values() for replay in of), key=lambda each: each.layer)
        self._dtype = torch.uint8 if expert_id_bytes(num_experts) == 1 else torch.int16
        self._recorded: dict[int, list[Tensor]] | None = None  # layer -> experts of each micro-batch

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers with a router, from 0, in ascending order."""
        return tuple(replay.layer for replay in self._replays)

    def begin_pass(self, is_training: bool) -> None:
        """Prepare for a pass over micro-batches. `is_training`: a backward pass is part of it."""
        for replay in self._replays:
            replay.is_training = is_training
            replay.recomputed.clear()

    def begin_forward(self, chunk: nn.Module, batch: MicroBatch) -> None:
        """Set the micro-batch's experts as the targets of the chunk's routers; without experts the routers choose."""
        routed = batch.routed_experts
        device = platform.device()
        for replay in self._by_chunk[id(chunk)]:
            replay.target = None
        if routed is not None:
            rows = copy_to(routed.rows, device)
            for replay in self._by_chunk[id(chunk)]:
                experts = routed.ids[:, self.layers.index(replay.layer)]
                replay.target = rows, copy_to(experts, device)

    def end_forward(self, chunk: nn.Module) -> None:
        """Store the routers' choices for this micro-batch if `record` was called."""
        if self._recorded is not None:
            for replay in self._by_chunk[id(chunk)]:
                assert replay.chosen is not None
                self._recorded[replay.layer].append(replay.chosen.to(self._dtype))

    def record(self) -> None:
        """Record the routers' choices until `take_recorded`."""
        self._recorded = {layer: [] for layer in self.layers}

    def take_recorded(self) -> list[ReplayedChoices]:
        """Stop recording; return the recorded experts of each micro-batch, [] without routers."""
        recorded = self._recorded or {}
        self._recorded = None
        by_microbatch = [torch.stack(layers, dim=1).cpu() for layers in zip(*recorded.values(), strict=True)]
        return [ReplayedChoices(torch.tensor([[0, len(each)]], dtype=torch.int32), each) for each in by_microbatch]

    def take_counts(self) -> tuple[int, int]:
        """Return and reset two counts of training passes: replayed experts not chosen by the router, and all replayed.

        The router chooses on the outputs of the replayed experts of the layers below.
        """
        differing = sum(int(replay.differing) for replay in self._replays)
        replayed = sum(replay.replayed for replay in self._replays)
        for replay in self._replays:
            replay.differing = replay.replayed = 0
        return differing, replayed


def check_router_replay(config: TransformerConfig) -> None:
    """Refuse models and router settings with which Megatron ignores `router_replay`."""
    if not config.num_moe_experts:
        raise UserError("training.router_replay needs a model with experts, model.path has none: set it to none")
    if config.moe_router_fusion or config.moe_router_load_balancing_type == "sinkhorn":
        name = "moe_router_fusion" if config.moe_router_fusion else "moe_router_load_balancing_type"
        raise UserError(
            f"training.megatron_args.{name}: these routers ignore replayed experts: leave it out, or set "
            "training.router_replay=none"
        )


def decoder_routers(chunk: nn.Module) -> list[TopKRouter]:
    """Return the routers of a chunk's decoder layers; the routers of multi-token-prediction layers are left out.

    Megatron 0.19 sets `is_mtp_layer` in those routers and numbers them from 1. Megatron 0.16 numbers them after the
    decoder layers.
    """
    routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
    routers = [router for router in routers if not getattr(router, "is_mtp_layer", False)]
    return [router for router in routers if (router.layer_number or 1) <= router.config.num_layers]


def _replay_in(router: TopKRouter) -> LayerReplay:
    ranking = router.router_replay if isinstance(router.router_replay, GroupLimitedTopk) else None
    router.router_replay = LayerReplay((router.layer_number or 1) - 1, ranking)
    return router.router_replay


class ExpertLoad:
    """Counts the tokens that this rank routes to each expert in training forwards, padding tokens included."""

    def __init__(self, models: Iterable[nn.Module], layers: int, experts: int) -> None:
        """Register hooks in the decoder layers' routers. `layers`, `experts`: of the full model; 0 experts: dense."""
        self._layers = layers
        self._experts = experts
        self._counts: dict[int, Tensor] = {}  # layer number, from 1 -> counts [experts] on the device
        for router in (router for model in models for router in decoder_routers(model)):
            router.register_forward_hook(self._count)

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
        """Add the counts of one forward. `output`: probabilities and routing map, [tokens, experts] each."""
        # So logprob passes do not count, and a forward that is recomputed in the backward pass counts once.
        if not torch.is_grad_enabled() or router.layer_number is None:
            return
        self._counts[router.layer_number] = self._counts.get(router.layer_number, 0) + output[1].detach().sum(0)


def load_ratios(load: Tensor) -> Tensor:
    """Return each expert's load divided by the mean load of its layer, [layers with routed tokens, experts]."""
    routed = load[load.sum(1) > 0]
    return routed / routed.mean(1, keepdim=True)
