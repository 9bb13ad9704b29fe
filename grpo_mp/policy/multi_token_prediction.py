"""Training of the multi-token-prediction (MTP) layer: Megatron's layer, whose loss does not change other weights."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from grpo_mp.utils.types import MicroBatch

# Arguments that Megatron's GPTModel passes on to the layer unchanged.
MTP_INPUTS = (
    *("position_ids", "attention_mask", "inference_params", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"),
    *("packed_seq_params", "sequence_len_offset"),
)


class NextTokenLayer(MultiTokenPredictionLayer):
    """Megatron's MTP layer for `input_ids` that are already shifted: each position has its next token.

    Megatron would shift them inside each packed sequence, but with shared prompts the next token may be in another.
    """

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Callable[..., Tensor],
        hidden_states: Tensor,
        packed_seq_params: Any = None,
        **padding_mask: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        embedded = embedding(input_ids=input_ids, position_ids=position_ids)
        # Megatron passes and expects a padding mask from version 0.19 on.
        return (input_ids, position_ids, *padding_mask.values(), embedded, hidden_states)

    def _checkpointed_forward(
        self, *_: Callable[..., Tensor], hidden_states: Tensor, decoder_input: Tensor, **others: Any
    ) -> Tensor:
        """Recompute activations in the backward pass; Megatron's method would save non-tensors for it."""

        def run(hidden: Tensor, embedded: Tensor) -> Tensor:
            output: Tensor = self._proj_and_transformer_layer(hidden_states=hidden, decoder_input=embedded, **others)
            return output

        # The checkpoint computes weight gradients only if an input requires a gradient.
        asking = hidden_states.detach().requires_grad_()
        distribute = self.config.distribute_saved_activations
        return tensor_parallel.checkpoint(run, distribute, asking, decoder_input)


class _ZeroGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):  # type: ignore[no-untyped-def]
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return torch.zeros_like(grad)


def embed_detached(embedding: Callable[..., Tensor], is_learning: bool, **inputs: Tensor) -> Tensor:
    """Embed tokens so that the MTP loss does not train the embedding.

    `is_learning`: whether this stage's embedding gets other gradients. The copy on the last pipeline stage does not;
    it gets gradient 0, because data parallelism waits for a gradient of every weight.
    """
    embedded = embedding(**inputs)
    return embedded.detach() if is_learning else _ZeroGradient.apply(embedded)


def mtp_block_spec(config: TransformerConfig, decoder: Any, vp_stage: int | None) -> Any:
    """Return the spec of a block with one NextTokenLayer; None if the MTP layer is on another pipeline stage."""
    spec = get_gpt_mtp_block_spec(config, decoder, use_transformer_engine=True, vp_stage=vp_stage)
    for layer in spec.layer_specs if spec else ():
        layer.module = NextTokenLayer
    return spec


@dataclass
class MtpLoss:
    """Loss of the MTP layer, which also sums metrics over micro-batches until `take_sums`."""

    scaling_factor: float
    # Sums over tokens: negative logprobs, acceptance probabilities, and the number of tokens.
    sums: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))

    def __call__(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """Return the weighted loss of a micro-batch, and add its metrics to `sums`. `logprobs` [T]: of `mtp_targets`.

        A draft token of q (the MTP layer) for p (the engine) is accepted with probability sum_x min(p(x), q(x))
        (arXiv 2211.17192, Theorem 3.5), the mean of min(1, q(x) / p(x)) over rollout tokens x, sampled from p.
        """
        assert batch.mtp_weights is not None
        assert batch.mtp_rollout_logprobs is not None
        weights = batch.mtp_weights.to(logprobs.device)
        learned = weights > 0  # logprobs of other tokens may be infinite
        values = logprobs.double().where(learned, 0.0)
        with torch.no_grad():
            rollout = batch.mtp_rollout_logprobs.to(values.device).double()
            ratio = (values - rollout.where(learned & rollout.isfinite(), 0.0)).clamp(max=0.0).exp()
            sums = torch.stack([-values.sum(), ratio.where(learned, 0.0).sum(), learned.sum().double()])
            self.sums = self.sums.to(sums.device) + sums
        return -self.scaling_factor * (values * weights).sum()

    def take_sums(self) -> Tensor:
        """Return `sums` on the CPU and reset them to zero."""
        sums = self.sums.cpu()
        self.sums = torch.zeros(3, dtype=torch.float64)
        return sums
