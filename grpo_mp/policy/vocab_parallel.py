"""Token logprobs and entropy over a vocabulary that tensor parallelism divides, a chunk of tokens at a time.

The logits of at most `chunk_tokens` tokens exist at once, forward and backward: backward makes them again
from the hidden states and the saved normaliser: the largest logit and the log of the sum over it, apart, because
float32 knows the small one better than their sum.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

NO_PROBABILITY = -128.0  # the float32 probability of any smaller logprob is 0, and 0 x infinity would not be a number


@dataclass(frozen=True)
class VocabularyShard:
    """Which columns of the vocabulary this rank holds; columns past `size` are padding."""

    start: int
    size: int  # of the whole vocabulary, without padding
    group: dist.ProcessGroup | None  # None: this rank holds all of it


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabularyShard, temperature: float, chunk_tokens: int
) -> Tensor:
    """Log-probability of each target and the entropy of each distribution, at the sampling temperature.

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
        for piece in _chunks(len(targets), chunk_tokens):
            logits = _logits(hidden[piece], weight, shard, temperature)
            result[:, piece], norm[:, piece] = _forward_chunk(logits, targets[piece], shard)
        ctx.save_for_backward(hidden, weight, targets, norm, result[1])
        ctx.shard, ctx.temperature, ctx.chunk_tokens = shard, temperature, chunk_tokens
        return result

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        hidden, weight, targets, norm, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for piece in _chunks(len(targets), ctx.chunk_tokens):
            logits = _logits(hidden[piece], weight, ctx.shard, ctx.temperature)
            grad_logits = _backward_chunk(
                logits, targets[piece], norm[:, piece], entropy[piece], grad[:, piece], ctx.shard
            )
            grad_logits = grad_logits.div_(ctx.temperature).to(weight.dtype)
            grad_hidden[piece] = grad_logits @ weight
            grad_weight += grad_logits.t() @ hidden[piece]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _logits(hidden: Tensor, weight: Tensor, shard: VocabularyShard, temperature: float) -> Tensor:
    logits = (hidden @ weight.t()).float().div_(temperature)
    real = shard.size - shard.start
    if real < logits.shape[1]:
        logits[:, max(real, 0) :] = float("-inf")
    return logits


def _forward_chunk(logits: Tensor, targets: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    top = logits.amax(dim=1)
    if shard.group is not None:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=shard.group)
    below = logits.sub_(top[:, None])
    columns, coords = _local(targets, shard, below.shape[1])
    picked = below.gather(1, columns[:, None])[:, 0].where(coords, 0.0)
    weights = below.exp()
    sums = torch.stack([weights.sum(1), weights.mul_(below.clamp_(min=NO_PROBABILITY)).sum(1), picked])
    if shard.group is not None:
        dist.all_reduce(sums, group=shard.group)
    log_sum = sums[0].log()
    return torch.stack([sums[2] - log_sum, log_sum - sums[1] / sums[0]]), torch.stack([top, log_sum])


def _backward_chunk(
    logits: Tensor, targets: Tensor, norm: Tensor, entropy: Tensor, grad: Tensor, shard: VocabularyShard
) -> Tensor:
    """d logprob / d logit = onehot - p;  d entropy / d logit = -p (log p + entropy)."""
    log_p = logits.sub_(norm[0][:, None]).sub_(norm[1][:, None])
    p = log_p.exp()
    slope = (log_p.clamp_(min=NO_PROBABILITY) + entropy[:, None]).mul_(grad[1][:, None])
    result = slope.add_(grad[0][:, None]).mul_(p).neg_()
    columns, coords = _local(targets, shard, logits.shape[1])
    result.scatter_add_(1, columns[:, None], grad[0].where(coords, 0.0)[:, None])
    return result


def _local(targets: Tensor, shard: VocabularyShard, width: int) -> tuple[Tensor, Tensor]:
    columns = targets - shard.start
    coords = (columns >= 0) & (columns < width)
    return columns.where(coords, 0), coords
