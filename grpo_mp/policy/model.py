"""The Megatron model of the policy: a GPTModel that answers with token logprobs instead of logits."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from grpo_mp import platform
from grpo_mp.config import Settings
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.policy.group_limited_routing import rank_groups_by
from grpo_mp.policy.latent_attention import keep_plain_queries
from grpo_mp.policy.shared_prompts import attend_to_prompts, rotate_by_position
from grpo_mp.policy.vocab_parallel import VocabularyShard, token_logprobs


@dataclass(frozen=True)
class Head:
    """How hidden states become logprobs."""

    temperature: float
    chunk_tokens: int
    vocabulary: int  # without padding


class PolicyModel(GPTModel):
    """One pipeline chunk of the policy. With `labels`, the last stage returns [2, T]: logprobs and entropies."""

    head: Head

    def _postprocess(self, *, hidden_states: Tensor, labels: Tensor | None, **_: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        hidden = self._whole_sequence(hidden_states)
        if labels is None:
            return hidden @ weight.t()
        group = self.pg_collection.tp
        parts = group.size()
        shard = VocabularyShard(
            start=group.rank() * weight.shape[0], size=self.head.vocabulary, group=group if parts > 1 else None
        )
        return token_logprobs(hidden, weight, labels[0], shard, self.head.temperature, self.head.chunk_tokens)

    def _whole_sequence(self, hidden: Tensor) -> Tensor:
        """[T/tensor, 1, H] -> [T, H]; backward sums the gradient over the tensor-parallel group."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        return hidden.squeeze(1)


def build_chunks(settings: Settings, hf: HfConfig, config: TransformerConfig) -> list[PolicyModel]:
    """This rank's model chunks, one per virtual pipeline stage, with weights not yet loaded."""
    chunks = settings.layout.virtual_pipeline or 1
    interleaved = settings.layout.virtual_pipeline is not None
    return [_build(settings, hf, config, chunk if interleaved else None) for chunk in range(chunks)]


def _build(settings: Settings, hf: HfConfig, config: TransformerConfig, chunk: int | None) -> PolicyModel:
    vocabulary, parts, family = hf.int("vocab_size"), settings.layout.tensor, family_of(hf)
    block = keep_plain_queries(config, get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=chunk))
    model = PolicyModel(
        config,
        attend_to_prompts(block) if settings.optimizer.share_prompts else block,
        vocab_size=-(-vocabulary // parts) * parts,
        max_sequence_length=hf.int("max_position_embeddings"),
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        share_embeddings_and_output_weights=hf.tied,
        position_embedding_type="rope",
        **family.rotary(hf),
        vp_stage=chunk,
    )
    if settings.optimizer.share_prompts:
        rotate_by_position(model)
    rank_groups_by(family.ranking_experts, model)
    model.head = Head(settings.rollout.temperature, settings.optimizer.logprob_chunk_tokens, vocabulary)
    on_meta = next(model.parameters()).is_meta
    return model.to(platform.device()) if torch.cuda.is_available() and not on_meta else model
