"""Micro-batches through Megatron's schedules: one function for logprobs, one for gradients."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from grpo_mp import platform
from grpo_mp.policy.shared_prompts import shared_prompt_params
from grpo_mp.types import MicroBatch

LossFunction = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, Any]]


def forward_only(chunks: Sequence[torch.nn.Module], microbatches: Sequence[MicroBatch]) -> list[Tensor]:
    """[2, T] logprobs and entropies of every micro-batch; empty on all but the last pipeline stage."""

    def collect(output: Tensor, non_loss_data: bool) -> Tensor:
        return output

    with torch.no_grad():
        outputs: list[Tensor] = _run(chunks, microbatches, lambda _: collect, forward_only=True)
    return outputs


def forward_backward(
    chunks: Sequence[torch.nn.Module], microbatches: Sequence[MicroBatch], loss: LossFunction
) -> list[Any]:
    """Accumulate the gradient of the summed loss; returns the loss function's second values (last stage only).

    `loss(logprobs [T], entropy [T], microbatch)` must already carry its global denominator.
    """

    def bound(batch: MicroBatch) -> Callable[[Tensor], tuple[Tensor, Tensor, Any]]:
        return partial(_loss_step, batch, loss)

    return _run(chunks, microbatches, bound, forward_only=False)


def _loss_step(batch: MicroBatch, loss: LossFunction, output: Tensor) -> tuple[Tensor, Tensor, Any]:
    value, report = loss(output[0], output[1], batch)
    # Megatron wants a token count; nothing divides by it, because gradients are not finalized with it.
    return value, torch.ones((), dtype=torch.int, device=value.device), report


def _run(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[MicroBatch],
    bind: Callable[[MicroBatch], Callable[..., Any]],
    forward_only: bool,
) -> list[Any]:
    def step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(batches)
        return _forward(model, batch), bind(batch)

    many = len(chunks) > 1
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(microbatches) for _ in chunks] if many else iter(microbatches),
        model=list(chunks) if many else chunks[0],
        num_microbatches=len(microbatches),
        seq_length=sum(microbatches[0].lengths),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _forward(model: torch.nn.Module, batch: MicroBatch) -> Tensor:
    device = platform.device()
    output: Tensor = model(
        batch.tokens[None].to(device),
        batch.positions[None].to(device),
        None,
        labels=batch.targets[None].to(device),
        packed_seq_params=_packed(batch, device),
    )
    return output


def _packed(batch: MicroBatch, device: torch.device) -> PackedSeqParams:
    if any(rows.count for rows in batch.prompts):
        return shared_prompt_params(batch.lengths, batch.prompts, batch.positions, device)
    return packed_sequences(batch.lengths)


@torch.no_grad()
def sequence_logits(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Tokens [T] of one sequence -> logits [T, V] on the host, of a model that is whole on this rank."""
    device, length = platform.device(), len(tokens)
    positions = torch.arange(length, device=device)
    output: Tensor = model(
        tokens.to(device)[None], positions[None], None, packed_seq_params=packed_sequences((length,))
    )
    return output.cpu()


def packed_sequences(lengths: Sequence[int]) -> PackedSeqParams:
    """How Megatron is told where the sequences of a micro-batch begin and end."""
    starts = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(platform.device())
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=starts,  # context parallelism asks for them; lengths here have their padding in them
        cu_seqlens_kv_padded=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
