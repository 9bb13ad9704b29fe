"""Token logprobs and entropies over a tensor-parallel vocabulary, one chunk of tokens at a time.

The float32 logits of at most `chunk_tokens` tokens exist at once. The backward pass recomputes them from the hidden
states. It uses the saved normalizer log sum_j exp(z_j) = m + log sum_j exp(z_j - m); z_j: logits, m: maximum. Both
terms are saved, because their float32 sum would lose precision.

Optionally the logprobs of further tokens are computed, and that of all remaining tokens together. The probability of
the remaining tokens is summed over their columns: 1 minus the sum of the others would be mostly rounding error if the
others have nearly all the probability.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mp.utils.types import LEAST_LOGPROB


@dataclass(frozen=True)
class VocabularyShard:
    """Vocabulary columns of this rank."""

    start: int  # first column of this rank
    size: int  # size of the full vocabulary; columns from here on are padding
    group: dist.ProcessGroup | None  # tensor-parallel group; None: this rank has all columns


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabularyShard,
    temperature: float,
    chunk_tokens: int,
    others: Tensor | None = None,
    fp32_head: bool = True,
) -> Tensor:
    """Return the logprob of each target and the entropy of each distribution, at `temperature`.

    hidden [T, H], weight [V / tensor-parallel size, H], targets [T] -> float32 [2, T]: row 0 logprobs, row 1 entropies
    [nats]. `others` [T, k]: distinct further tokens of each row, or NO_TOKEN. They add k + 1 rows: their logprobs, and
    the logprob of all tokens except `others` together. These rows are clamped at LEAST_LOGPROB, with gradient 0 there.
    `fp32_head=False` rounds logits to the dtype of the weight. The gradient of `hidden` is this rank's part, which the
    caller must sum over the tensor-parallel group.
    """
    result: Tensor = _TokenLogprobs.apply(hidden, weight, targets, shard, temperature, chunk_tokens, others, fp32_head)
    return result


def output_logits(hidden: Tensor, weight: Tensor, fp32_head: bool = True) -> Tensor:
    """Return the float32 logits [T, V] of hidden [T, H] and weight [V, H], without a backward pass.

    With `fp32_head` the product of bfloat16 operands is float32; on a GPU neither operand is copied to float32. Without
    `fp32_head` the product is rounded to bfloat16, for example a logit of 20 to a multiple of 1/8.
    """
    if not fp32_head or hidden.dtype == torch.float32:
        return (hidden @ weight.t()).float()
    if hidden.device.type != "cpu":
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    # torch.mm has no out_dtype on a CPU. The columns are converted in chunks of at most half the bytes of the logits.
    logits = torch.empty(len(hidden), len(weight), dtype=torch.float32)
    wide = hidden.float()
    for columns in _chunks(len(weight), max(1, logits.numel() // (2 * hidden.shape[1]))):
        logits[:, columns] = wide @ weight[columns].float().t()
    return logits


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, shard, temperature, chunk_tokens, others, fp32_head):  # type: ignore[no-untyped-def]
        rows = 2 if others is None else 3 + others.shape[1]
        result = torch.empty(rows, len(targets), dtype=torch.float32, device=hidden.device)
        norm = torch.empty_like(result[:2])
        for chunk in _chunks(len(targets), chunk_tokens):
            logits = _logits(hidden[chunk], weight, shard=shard, temperature=temperature, fp32_head=fp32_head)
            result[:, chunk], norm[:, chunk] = _forward_chunk(
                logits, targets[chunk], shard, None if others is None else others[chunk]
            )
        ctx.save_for_backward(hidden, weight, targets, norm, result[1:], others)
        ctx.shard = shard
        ctx.temperature = temperature
        ctx.chunk_tokens = chunk_tokens
        ctx.fp32_head = fp32_head
        return result

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        hidden, weight, targets, norm, known, others = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        learns = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if learns else None
        for chunk in _chunks(len(targets), ctx.chunk_tokens):
            logits = _logits(
                hidden[chunk], weight, shard=ctx.shard, temperature=ctx.temperature, fp32_head=ctx.fp32_head
            )
            grad_logits = _backward_chunk(
                *(logits, targets[chunk], norm[:, chunk], known[:, chunk], grad[:, chunk], ctx.shard),
                None if others is None else others[chunk],
            )
            grad_logits = grad_logits.div_(ctx.temperature).to(weight.dtype)
            grad_hidden[chunk] = grad_logits @ weight
            if learns:
                grad_weight += grad_logits.t() @ hidden[chunk]
        return grad_hidden, grad_weight.to(weight.dtype) if learns else None, *(None,) * 6


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _logits(hidden: Tensor, weight: Tensor, shard: VocabularyShard, temperature: float, fp32_head: bool) -> Tensor:
    logits = output_logits(hidden, weight, fp32_head).div_(temperature)
    unpadded = shard.size - shard.start
    if unpadded < logits.shape[1]:
        logits[:, max(unpadded, 0) :] = float("-inf")
    return logits


def _forward_chunk(
    logits: Tensor, targets: Tensor, shard: VocabularyShard, others: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the result rows of `token_logprobs`, and the normalizer [2, T]: maximum, log of the sum relative to it."""
    maximum = logits.amax(dim=1)
    if shard.group is not None:
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=shard.group)
    shifted = logits.sub_(maximum[:, None])
    columns, is_local = _local_columns(_tokens(targets, others), shard, shifted.shape[1])
    token_logits = shifted.gather(1, columns).where(is_local, 0.0)
    exp = shifted.exp()
    sums = [exp.sum(1)]
    if others is not None:
        sums.append(_zero(exp.clone(), columns[:, 1:], is_local[:, 1:]).sum(1))
    sums.append(exp.mul_(shifted.clamp_(min=LEAST_LOGPROB)).sum(1))
    reduced = torch.cat([torch.stack(sums), token_logits.t()])
    if shard.group is not None:
        dist.all_reduce(reduced, group=shard.group)
    total = reduced[0]
    weighted = reduced[len(sums) - 1]
    picked = reduced[len(sums) :]
    log_sum = total.log()
    result = [picked[0] - log_sum, log_sum - weighted / total]
    if others is not None:
        logprobs = (picked[1:] - log_sum).masked_fill(others.t() < 0, LEAST_LOGPROB)
        result += [*logprobs.clamp_(min=LEAST_LOGPROB), (reduced[1].log() - log_sum).clamp_(min=LEAST_LOGPROB)]
    return torch.stack(result), torch.stack([maximum, log_sum])


def _backward_chunk(
    logits: Tensor,
    targets: Tensor,
    norm: Tensor,
    known: Tensor,
    grad: Tensor,
    shard: VocabularyShard,
    others: Tensor | None,
) -> Tensor:
    """Return the gradient of the logits z_j, for `grad` [rows, T] of the result rows.

    With p_j = softmax(z)_j: d logprob(t) / d z_j = [j = t] - p_j; d entropy / d z_j = -p_j (log p_j + entropy). With
    the total probability r of all tokens except `others`: d log r / d z_j = p_j / r - p_j if j is one of these tokens,
    else -p_j. `norm`: the normalizer; `known`: the result rows without the first.
    """
    grad_tokens, grad_rest = grad[:1], None
    if others is not None:
        learned = grad[2:].where(known[1:] > LEAST_LOGPROB, 0.0)
        grad_tokens, grad_rest = torch.cat([grad_tokens, learned[:-1]]), learned[-1][:, None]
    log_p = logits.sub_(norm[0][:, None]).sub_(norm[1][:, None])
    columns, is_local = _local_columns(_tokens(targets, others), shard, logits.shape[1])
    p, share = log_p.exp(), None
    if grad_rest is not None:
        share = log_p.sub(known[-1][:, None]).clamp_(max=0.0).exp_()
        share = _zero(share, columns[:, 1:], is_local[:, 1:]).mul_(grad_rest)
    slope = (log_p.clamp_(min=LEAST_LOGPROB) + known[0][:, None]).mul_(grad[1][:, None])
    total = grad_tokens.sum(0)[:, None] if grad_rest is None else grad_tokens.sum(0)[:, None] + grad_rest
    result = slope.add_(total).mul_(p).neg_()
    if share is not None:
        result.add_(share)
    result.scatter_add_(1, columns, grad_tokens.t().where(is_local, 0.0))
    return result


def _tokens(targets: Tensor, others: Tensor | None) -> Tensor:
    return targets[:, None] if others is None else torch.cat([targets[:, None], others.to(targets.dtype)], 1)


def _zero(values: Tensor, columns: Tensor, is_local: Tensor) -> Tensor:
    zeros = torch.zeros_like(columns, dtype=values.dtype).masked_fill_(~is_local, float("inf"))
    return values.scatter_reduce_(1, columns, zeros, "amin")


def _local_columns(tokens: Tensor, shard: VocabularyShard, width: int) -> tuple[Tensor, Tensor]:
    columns = tokens - shard.start
    is_local = (tokens >= 0) & (columns >= 0) & (columns < width)
    return columns.where(is_local, 0), is_local
