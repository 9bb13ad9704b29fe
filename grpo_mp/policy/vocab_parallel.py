"""Token logprobs and entropy over a tensor-parallel vocabulary, one chunk of tokens at a time.

Logits of at most `chunk_tokens` tokens exist at once. Backward recomputes them from the hidden states and the saved
normalizer: the maximum logit and the log of the sum relative to it, saved separately because their float32 sum would
lose precision.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

NO_PROBABILITY = -128.0  # exp() of anything smaller is 0 in float32, and 0 * infinity would be NaN


@dataclass(frozen=True)
class VocabularyShard:
    """The vocabulary columns of this rank, from `start`; columns past `size` are padding."""

    start: int
    size: int  # of the full vocabulary, without padding
    group: dist.ProcessGroup | None  # None: this rank holds all of it


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabularyShard, temperature: float, chunk_tokens: int
) -> Tensor:
    """Return the log-probability of each target and the entropy of each distribution, at the sampling temperature.

    hidden [T, H], weight [V/tensor, H], targets [T] -> float32 [2, T]: row 0 logprobs, row 1 entropies in nats.
    The gradient of `hidden` is this rank's part only: the caller sums it over the tensor-parallel group.
    """
    result: Tensor = _TokenLogprobs.apply(hidden, weight, targets, shard, temperature, chunk_tokens)
    return result


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, shard, temperature, chunk_tokens):  # type: ignore[no-untyped-def]
        result = torch.empty(2, len(targets), dtype=torch.float32, device=hidden.device)
        norm = torch.empty_like(result)
        for chunk in _chunks(len(targets), chunk_tokens):
            logits = _logits(hidden[chunk], weight, shard, temperature)
            result[:, chunk], norm[:, chunk] = _forward_chunk(logits, targets[chunk], shard)
        ctx.save_for_backward(hidden, weight, targets, norm, result[1])
        ctx.shard, ctx.temperature, ctx.chunk_tokens = shard, temperature, chunk_tokens
        return result

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        hidden, weight, targets, norm, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        learns = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if learns else None
        for chunk in _chunks(len(targets), ctx.chunk_tokens):
            logits = _logits(hidden[chunk], weight, ctx.shard, ctx.temperature)
            grad_logits = _backward_chunk(
                logits, targets[chunk], norm[:, chunk], entropy[chunk], grad[:, chunk], ctx.shard
            )
            grad_logits = grad_logits.div_(ctx.temperature).to(weight.dtype)
            grad_hidden[chunk] = grad_logits @ weight
            if learns:
                grad_weight += grad_logits.t() @ hidden[chunk]
        return grad_hidden, grad_weight.to(weight.dtype) if learns else None, None, None, None, None


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _logits(hidden: Tensor, weight: Tensor, shard: VocabularyShard, temperature: float) -> Tensor:
    logits = (hidden @ weight.t()).float().div_(temperature)
    unpadded = shard.size - shard.start
    if unpadded < logits.shape[1]:
        logits[:, max(unpadded, 0) :] = float("-inf")
    return logits


def _forward_chunk(logits: Tensor, targets: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Return [2, T] logprobs and entropies, and [2, T] maximum and log of the sum relative to it."""
    maximum = logits.amax(dim=1)
    if shard.group is not None:
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=shard.group)
    shifted = logits.sub_(maximum[:, None])
    columns, is_local = _local_columns(targets, shard, shifted.shape[1])
    target_logits = shifted.gather(1, columns[:, None])[:, 0].where(is_local, 0.0)
    exp = shifted.exp()
    sums = torch.stack([exp.sum(1), exp.mul_(shifted.clamp_(min=NO_PROBABILITY)).sum(1), target_logits])
    if shard.group is not None:
        dist.all_reduce(sums, group=shard.group)
    log_sum = sums[0].log()
    return torch.stack([sums[2] - log_sum, log_sum - sums[1] / sums[0]]), torch.stack([maximum, log_sum])


def _backward_chunk(
    logits: Tensor, targets: Tensor, norm: Tensor, entropy: Tensor, grad: Tensor, shard: VocabularyShard
) -> Tensor:
    """Return the gradient of the logits: d logprob = onehot - p; d entropy = -p (log p + entropy)."""
    log_p = logits.sub_(norm[0][:, None]).sub_(norm[1][:, None])
    p = log_p.exp()
    slope = (log_p.clamp_(min=NO_PROBABILITY) + entropy[:, None]).mul_(grad[1][:, None])
    result = slope.add_(grad[0][:, None]).mul_(p).neg_()
    columns, is_local = _local_columns(targets, shard, logits.shape[1])
    result.scatter_add_(1, columns[:, None], grad[0].where(is_local, 0.0)[:, None])
    return result


def _local_columns(targets: Tensor, shard: VocabularyShard, width: int) -> tuple[Tensor, Tensor]:
    """Return each target's column on this rank (0 where it has none), and whether it has one."""
    columns = targets - shard.start
    is_local = (columns >= 0) & (columns < width)
    return columns.where(is_local, 0), is_local
