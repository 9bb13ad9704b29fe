"""Forward and backward passes of micro-batches with Megatron's pipeline schedules."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from grpo_mp import platform
from grpo_mp.policy.routing_replay import RoutingReplay
from grpo_mp.policy.shared_prompt_attention import packed_sequences, shared_prompt_params
from grpo_mp.policy.sparse_attention import prepare_forward
from grpo_mp.utils.types import MicroBatch, copy_to

# LossFunction gets logprobs [T] and entropies [T], OutputLoss the last stage's output. Both return a loss and a report.
LossFunction = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, Any]]
OutputLoss = Callable[[Tensor, MicroBatch], tuple[Tensor, Any]]


def forward_only(
    chunks: Sequence[torch.nn.Module], microbatches: Sequence[MicroBatch], replay: RoutingReplay | None = None
) -> list[Tensor]:
    """Return the model output for each micro-batch; an empty list on all but the last pipeline stage.

    A policy's output is [2, T]: logprobs and entropies. A critic's output is [T]: values.
    """

    def collect(output: Tensor, non_loss_data: bool) -> Tensor:
        return output

    with torch.no_grad():
        outputs: list[Tensor] = _run(chunks, microbatches, lambda _: collect, replay, forward_only=True)
    return outputs


def forward_backward(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[MicroBatch],
    loss: OutputLoss,
    replay: RoutingReplay | None = None,
) -> list[Any]:
    """Accumulate the gradient of the summed loss and return the report of each micro-batch (last stage only).

    `loss`: already divided by its global denominator.
    """

    def loss_step(batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Any]:
        value, report = loss(output, batch)
        # Megatron requires a token count. Nothing divides by it: _sum_gradients drops the count.
        return value, torch.ones((), dtype=torch.int, device=value.device), report

    return _run(chunks, microbatches, lambda batch: partial(loss_step, batch), replay, forward_only=False)


def _run(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[MicroBatch],
    loss_for: Callable[[MicroBatch], Callable[..., Any]],
    replay: RoutingReplay | None,
    forward_only: bool,
) -> list[Any]:
    """Run Megatron's pipeline schedule. `loss_for`: returns the function that gets a micro-batch's output."""

    def step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(batches)
        if replay is None:
            return _forward(model, batch), loss_for(batch)
        replay.begin_forward(model, batch)
        output = _forward(model, batch, replay.key_layers)
        replay.end_forward(model)
        return output, loss_for(batch)

    if replay:
        replay.begin_pass(is_training=not forward_only)
    interleaved = len(chunks) > 1
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(microbatches) for _ in chunks] if interleaved else iter(microbatches),
        model=list(chunks) if interleaved else chunks[0],
        num_microbatches=len(microbatches),
        seq_length=sum(microbatches[0].lengths),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _forward(model: torch.nn.Module, batch: MicroBatch, key_layers: Sequence[int] = ()) -> Tensor:
    device = platform.device()
    if any(rows.count for rows in batch.prompt_rows):
        packed = shared_prompt_params(batch.lengths, batch.prompt_rows, batch.positions, device)
    else:
        packed = packed_sequences(batch.lengths, device)
        prepare_forward(packed, batch, model.config, key_layers)
    output: Tensor = model(
        copy_to(batch.tokens[None], device),
        copy_to(batch.positions[None], device),
        None,
        labels=copy_to(_labels(batch), device),
        packed_seq_params=packed,
    )
    return output


def _labels(batch: MicroBatch) -> Tensor:
    others = batch.kept_ids if batch.teacher_topk_ids is None or not torch.is_grad_enabled() else batch.teacher_topk_ids
    if others is not None:
        after = batch.targets if batch.mtp_targets is None else batch.mtp_targets
        return torch.cat([torch.stack([batch.targets, after]), others.t().to(batch.targets.dtype)])
    return torch.stack([batch.targets] if batch.mtp_targets is None else [batch.targets, batch.mtp_targets])


@torch.no_grad()
def sequence_logits(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits [T, V] of one sequence `tokens` [T], as a CPU tensor. The model must be unsharded."""
    device = platform.device()
    length = len(tokens)
    positions = torch.arange(length, device=device)
    output: Tensor = model(
        tokens.to(device)[None], positions[None], None, packed_seq_params=packed_sequences((length,), device)
    )
    return output.cpu()
