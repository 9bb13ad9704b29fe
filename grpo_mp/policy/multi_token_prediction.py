"""The multi-token-prediction layer in training: Megatron's own, told the next tokens, apart from all other weights."""

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

# What Megatron's GPTModel gives the layer as it is; where it is packed, and how it is rotated.
MTP_INPUTS = (
    *("position_ids", "attention_mask", "inference_params", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"),
    *("packed_seq_params", "sequence_len_offset"),
)


class NextTokenLayer(MultiTokenPredictionLayer):
    """Megatron's layer, whose input tokens are already each token's next one.

    Megatron would move them by one place inside each packed sequence, with messages between context-parallel ranks;
    where prompts are shared the next token is in another sequence.
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
        return (input_ids, position_ids, *padding_mask.values(), embedded, hidden_states)  # the mask from 0.19 on

    def _checkpointed_forward(
        self, *_: Callable[..., Tensor], hidden_states: Tensor, decoder_input: Tensor, **others: Any
    ) -> Tensor:
        """Recompute the layer in its backward pass. Megatron's own would save what is no tensor.

        An input must ask for a gradient: without one no weight would get any, and those here are detached.
        """

        def run(hidden: Tensor, embedded: Tensor) -> Tensor:
            output: Tensor = self._proj_and_transformer_layer(hidden_states=hidden, decoder_input=embedded, **others)
            return output

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
    """Embed tokens without a gradient to the embedding.

    `is_learning`: other gradients reach it. Where it is a copy, on the last stage, they do not: its gradient is 0 then,
    for data parallelism waits for one of each weight, and the first stage's is added.
    """
    embedded = embedding(**inputs)
    return embedded.detach() if is_learning else _ZeroGradient.apply(embedded)


def mtp_block_spec(config: TransformerConfig, decoder: Any, vp_stage: int | None) -> Any:
    """Return the spec of a block with one NextTokenLayer; None if the layer is on another stage."""
    spec = get_gpt_mtp_block_spec(config, decoder, use_transformer_engine=True, vp_stage=vp_stage)
    for layer in spec.layer_specs if spec else ():
        layer.module = NextTokenLayer
    return spec


@dataclass
class MtpLoss:
    """The loss of the layer, and sums of what it predicts, over the micro-batches since they were taken."""

    scaling_factor: float
    sums: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))  # loss, acceptance, tokens

    def __call__(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """Return the weighted loss of a micro-batch: `logprobs` [T] of `mtp_targets`.

        Drafts sampled from q are accepted by p with the probability sum min(p, q) (Leviathan et al., arXiv 2211.17192,
        Theorem 3.5), the mean of min(1, q / p) over tokens sampled from p.
        """
        assert batch.mtp_weights is not None
        assert batch.mtp_rollout_logprobs is not None
        weights = batch.mtp_weights.to(logprobs.device)
        learned = weights > 0  # what is not may be infinite
        values = logprobs.double().where(learned, 0.0)
        with torch.no_grad():
            rollout = batch.mtp_rollout_logprobs.to(values.device).double()
            ratio = (values - rollout.where(learned & rollout.isfinite(), 0.0)).clamp(max=0.0).exp()
            sums = torch.stack([-values.sum(), ratio.where(learned, 0.0).sum(), learned.sum().double()])
            self.sums = self.sums.to(sums.device) + sums
        return -self.scaling_factor * (values * weights).sum()

    def take_sums(self) -> Tensor:
        sums, self.sums = self.sums.cpu(), torch.zeros(3, dtype=torch.float64)
        return sums
