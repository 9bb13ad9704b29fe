"""Token logprobs and entropies over a tensor-parallel vocabulary, one chunk of tokens at a time.

The float32 logits of at most `chunk_tokens` tokens exist at once. The backward pass recomputes them from the hidden
states, with the saved normalizer log sum_j exp(z_j) = m + log sum_j exp(z_j - m); z_j: logits, m: maximum. Both terms
are saved, because their float32 sum would lose precision.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mp.utils.types import LEAST_LOGPROB


@dataclass(frozen=True)
class Head:
    """Settings of the LM head, which turns hidden states into logprobs."""

    temperature: float
    chunk_tokens: int  # tokens whose logits exist at a time
    vocabulary: int  # size of the full vocabulary; columns from here on are padding
    fp32: bool = True  # False: round logits to the model's dtype
    with_squares: bool = False  # return the sums of squared probabilities, too; without a backward pass


@dataclass(frozen=True)
class VocabularyShard:
    """Vocabulary columns of this rank."""

    head: Head
    start: int = 0  # first column of this rank
    group: dist.ProcessGroup | None = None  # tensor-parallel group; None: this rank has all columns


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabularyShard, others: Tensor | None = None
) -> Tensor:
    """Return the logprob of each target and the entropy of each distribution, at the head's temperature.

    hidden [T, H], weight [V / tensor-parallel size, H], targets [T] -> float32 [2, T]: row 0 logprobs, row 1 entropies
    [nats]. `others` [T, k]: distinct further tokens of each row, or NO_TOKEN. They add k + 1 rows: their logprobs, and
    the logprob of all tokens except `others` together. These rows are clamped at LEAST_LOGPROB, with gradient 0 there.
    With `head.with_squares` the last row is the sum of the squares of all probabilities.
    The gradient of `hidden` is this rank's part, which the caller must sum over the tensor-parallel group.
    """
    tokens = targets[:, None]
    if others is not None:
        tokens = torch.cat([tokens, others.to(targets.dtype)], 1)
    result: Tensor = _TokenLogprobs.apply(hidden, weight, tokens, shard)
    return result


def within_kept(output: Tensor, kept_ids: Tensor, with_squares: bool = False) -> tuple[Tensor, Tensor]:
    """Return logprobs and entropies of the distribution over the kept tokens, [2, T], and the log of their mass [T].

    `output`: rows of `token_logprobs` with `others` = `kept_ids` [T, k], the tokens that sampling kept, among them the
    target; NO_TOKEN pads a row, and a row of padding keeps all tokens. With K the kept tokens: log p(t) - log p(K), and
    -sum over K of q log q with q = p / p(K). The set is a constant, so the gradient is that of this distribution
    (DeepSeek-V3.2, arXiv 2512.02556, section 3.1: keep sampling mask). The log mass has no gradient.
    `with_squares`: the last row of `output` has the sums of squared probabilities, and the result has a third row:
    the sum over K of q squared.
    """
    ids = kept_ids.to(output.device).t()
    known = ids >= 0
    keeps_all = ~known.any(0)
    log_p = output[2 : 2 + len(ids)].double()
    in_sum = log_p.masked_fill(~known, float("-inf"))
    log_mass = in_sum.masked_fill(keeps_all, 0.0).logsumexp(0).where(~keeps_all, 0.0)
    log_q = (log_p - log_mass).masked_fill(~known, 0.0)
    entropy = -(log_q.exp() * log_q).sum(0)
    rows = [output[0] - log_mass, entropy.where(~keeps_all, output[1].double())]
    if with_squares:
        squares = (log_q.exp().square() * known).sum(0)
        rows.append(squares.where(~keeps_all, output[-1].double()))
    return torch.stack(rows).to(output.dtype), log_mass.detach().to(output.dtype)


def output_logits(hidden: Tensor, weight: Tensor, fp32_head: bool = True) -> Tensor:
    """Return the float32 logits [T, V] of hidden [T, H] and weight [V, H], without a backward pass.

    With `fp32_head` the product of operands of 16 bits is float32. Otherwise it is rounded to their dtype, for example
    a logit of 20 in bfloat16 to a multiple of 1/8.
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
    def forward(ctx, hidden, weight, tokens, shard):  # type: ignore[no-untyped-def]
        rows = (2 if tokens.shape[1] == 1 else 2 + tokens.shape[1]) + shard.head.with_squares
        result = torch.empty(rows, len(tokens), dtype=torch.float32, device=hidden.device)
        norm = torch.empty_like(result[:2])
        for chunk in _chunks(len(tokens), shard.head.chunk_tokens):
            logits = _logits(hidden[chunk], weight, shard)
            result[:, chunk], norm[:, chunk] = _forward_chunk(logits, tokens[chunk], shard)
        ctx.save_for_backward(hidden, weight, tokens, norm, result[1:])
        ctx.shard = shard
        return result

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        hidden, weight, tokens, norm, known = ctx.saved_tensors
        shard: VocabularyShard = ctx.shard
        grad_hidden = torch.empty_like(hidden)
        learns = ctx.needs_input_grad[1]
        sums_directly = learns and _has_own_float32_sum(weight)
        if sums_directly:
            grad_weight = weight.main_grad
        else:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32) if learns else None
        for chunk in _chunks(len(tokens), shard.head.chunk_tokens):
            columns, is_local = _local_columns(tokens[chunk], shard, len(weight))
            logits = _logits(hidden[chunk], weight, shard)
            log_p = logits.sub_(norm[0, chunk][:, None]).sub_(norm[1, chunk][:, None])
            grad_logits = _backward_chunk(log_p, known[:, chunk], grad[:, chunk], columns, is_local)
            grad_logits = grad_logits.div_(shard.head.temperature).to(weight.dtype)
            grad_hidden[chunk] = grad_logits @ weight
            if learns:
                grad_weight += grad_logits.t() @ hidden[chunk]
        if sums_directly:
            weight.grad_added_to_main_grad = True  # Megatron's hook requires a gradient, but then does not read it
            grad_weight = torch.empty_like(weight)
        return grad_hidden, grad_weight.to(weight.dtype) if learns else None, None, None


def _has_own_float32_sum(weight: Tensor) -> bool:
    """Return whether the weight has a float32 sum of gradients to which only the output layer adds.

    Megatron marks a weight that is the embedding's, too, by one of two attributes.
    """
    tied = getattr(weight, "zero_out_wgrad", False) or getattr(weight, "shared_embedding", False)
    main_grad = getattr(weight, "main_grad", None)
    return main_grad is not None and main_grad.dtype == torch.float32 and not tied


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _logits(hidden: Tensor, weight: Tensor, shard: VocabularyShard) -> Tensor:
    logits = output_logits(hidden, weight, shard.head.fp32).div_(shard.head.temperature)
    unpadded = shard.head.vocabulary - shard.start
    if unpadded < logits.shape[1]:
        logits[:, max(unpadded, 0) :] = float("-inf")
    return logits


def _forward_chunk(logits: Tensor, tokens: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Return the result rows of `token_logprobs`, and the normalizer [2, T]: maximum, log of the sum relative to it."""
    maximum = logits.amax(dim=1)
    if shard.group is not None:
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=shard.group)
    shifted = logits.sub_(maximum[:, None])
    columns, is_local = _local_columns(tokens, shard, shifted.shape[1])
    token_logits = shifted.gather(1, columns).where(is_local, 0.0)
    exp = shifted.exp()
    sums = [exp.sum(1)]
    has_others = tokens.shape[1] > 1
    if has_others:  # 1 minus the sum of the others would be mostly rounding error if they have nearly all probability
        sums.append(_zero(exp.clone(), columns[:, 1:], is_local[:, 1:]).sum(1))
    if shard.head.with_squares:
        sums.append(torch.linalg.vector_norm(exp, dim=1).square())
    sums.append(exp.mul_(shifted.clamp_(min=LEAST_LOGPROB)).sum(1))
    reduced = torch.cat([torch.stack(sums), token_logits.t()])
    if shard.group is not None:
        dist.all_reduce(reduced, group=shard.group)
    total = reduced[0]
    weighted = reduced[len(sums) - 1]
    picked = reduced[len(sums) :]
    log_sum = total.log()
    result = [picked[0] - log_sum, log_sum - weighted / total]
    if has_others:
        logprobs = (picked[1:] - log_sum).masked_fill(tokens[:, 1:].t() < 0, LEAST_LOGPROB)
        result += [*logprobs.clamp_(min=LEAST_LOGPROB), (reduced[1].log() - log_sum).clamp_(min=LEAST_LOGPROB)]
    if shard.head.with_squares:
        result.append(reduced[len(sums) - 2] / total.square())
    return torch.stack(result), torch.stack([maximum, log_sum])


def _backward_chunk(log_p: Tensor, known: Tensor, grad: Tensor, columns: Tensor, is_local: Tensor) -> Tensor:
    """Return the gradient of the logits z_j, for `grad` [rows, T] of the result rows. `log_p`: log softmax(z).

    With p_j = softmax(z)_j: d logprob(t) / d z_j = [j = t] - p_j; d entropy / d z_j = -p_j (log p_j + entropy). With
    the total probability r of all tokens except `others`: d log r / d z_j = p_j / r - p_j if j is one of these tokens,
    else -p_j. `known`: the result rows without the first; `columns`, `is_local`: of the target and of `others`.
    """
    grad_tokens = grad[:1]
    grad_rest = None
    if len(grad) > 2:
        learned = grad[2:].where(known[1:] > LEAST_LOGPROB, 0.0)
        grad_tokens = torch.cat([grad_tokens, learned[:-1]])
        grad_rest = learned[-1][:, None]
    p = log_p.exp()
    share = None
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


def _zero(values: Tensor, columns: Tensor, is_local: Tensor) -> Tensor:
    zeros = torch.zeros_like(columns, dtype=values.dtype).masked_fill_(~is_local, float("inf"))
    return values.scatter_reduce_(1, columns, zeros, "amin")


def _local_columns(tokens: Tensor, shard: VocabularyShard, width: int) -> tuple[Tensor, Tensor]:
    columns = tokens - shard.start
    is_local = (tokens >= 0) & (columns >= 0) & (columns < width)
    return columns.where(is_local, 0), is_local
