"""The policy's Megatron model: a GPTModel that returns token logprobs instead of logits."""

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from grpo_mp import platform
from grpo_mp.config.sections import TrainingConfig
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.policy.deepseek import set_group_ranking, use_latent_attention
from grpo_mp.policy.gated_delta_net import linear_attention_spec
from grpo_mp.policy.multi_token_prediction import MTP_INPUTS, embed_detached, mtp_block_spec
from grpo_mp.policy.shared_prompt_attention import use_per_token_rotary, use_shared_prompt_attention
from grpo_mp.policy.sparse_attention import prepare_indexers
from grpo_mp.policy.vocab_parallel import Head, VocabularyShard, output_logits, token_logprobs
from grpo_mp.policy.whole_norm import use_whole_norms


class PolicyModel(GPTModel):
    """One pipeline chunk of the policy. With `labels`, the last stage returns logprobs instead of logits.

    Labels [1, T]: each token's next token. The output is [2, T]: logprobs of the labels and entropies.
    Labels [2, T]: row 1 has the token after the next. With gradients enabled, the multi-token-prediction layer's
    logprobs of row 1 are appended as the last output row; their gradient reaches only that layer.
    Labels [2 + k, T]: the other rows have k alternatives to the next token. After the first two output rows follow
    k + 1 rows: the logprobs of the alternatives, and of all remaining tokens together (see `token_logprobs`).
    """

    head: Head

    def _postprocess(self, *, hidden_states: Tensor, labels: Tensor | None, **inputs: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        if labels is None:
            return output_logits(self._gathered(hidden_states), weight, self.head.fp32)
        others = labels[2:].t() if len(labels) > 2 else None
        output = self._token_logprobs(hidden_states, weight, labels[0], others)
        if not self.mtp_process or len(labels) == 1 or not torch.is_grad_enabled():
            return output
        (layer,) = self.mtp.layers
        ahead, *_ = layer(
            input_ids=labels[:1],
            hidden_states=hidden_states.detach(),
            embedding=partial(embed_detached, self.embedding, self.pre_process),
            **{name: inputs[name] for name in MTP_INPUTS},
        )
        return torch.cat([output, self._token_logprobs(ahead, weight.detach(), labels[1])[:1]])

    def _gathered(self, hidden: Tensor) -> Tensor:
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        return hidden.squeeze(1)

    def _token_logprobs(self, hidden: Tensor, weight: Tensor, targets: Tensor, others: Tensor | None = None) -> Tensor:
        group = self.pg_collection.tp
        start = group.rank() * weight.shape[0]
        shard = VocabularyShard(self.head, start, group if group.size() > 1 else None)
        return token_logprobs(self._gathered(hidden), weight, targets, shard, others)


class ValueHead(torch.nn.Module):
    """Linear layer from hidden states [T, H] to values [T], in float32; replicated over tensor-parallel ranks."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden.float() @ self.weight.float().t()).squeeze(1)


class ValueModel(PolicyModel):
    """One pipeline chunk of a critic. The output layer is a value head, so the last stage returns values [T]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:
            self.output_layer = ValueHead(self.config.hidden_size, self.config.params_dtype)

    def _postprocess(self, *, hidden_states: Tensor, **inputs: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:  # every rank computes the whole gradient, so it must not be summed
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return self.output_layer(hidden_states.squeeze(1))


def build_chunks(
    config: TransformerConfig,
    hf: HfConfig,
    training: TrainingConfig,
    temperature: float,
    fp32_head: bool = True,
    model_class: type[PolicyModel] = PolicyModel,
) -> list[PolicyModel]:
    """Build this rank's model chunks, one per virtual pipeline stage, without loading their weights."""
    chunks = config.virtual_pipeline_model_parallel_size
    head = Head(temperature, training.logprob_chunk_tokens, hf.int("vocab_size"), fp32_head)
    stages = range(chunks) if chunks else (None,)
    return [
        _build_chunk(
            config, hf, head=head, share_prompts=training.share_prompts, vp_stage=stage, model_class=model_class
        )
        for stage in stages
    ]


def _build_chunk(
    config: TransformerConfig,
    hf: HfConfig,
    head: Head,
    share_prompts: bool,
    vp_stage: int | None,
    model_class: type[PolicyModel],
) -> PolicyModel:
    tp_size = config.tensor_model_parallel_size
    family = family_of(hf)
    if config.experimental_attention_variant:
        spec = linear_attention_spec(config, vp_stage)
    else:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    use_latent_attention(config, spec)
    if family.norms_over_heads:
        use_whole_norms(spec)
    if share_prompts:
        use_shared_prompt_attention(spec)
    model = model_class(
        config,
        spec,
        vocab_size=-(-head.vocabulary // tp_size) * tp_size,
        max_sequence_length=hf.int("max_position_embeddings"),
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=hf.tied,
        position_embedding_type="rope",
        **family.rotary(hf),
        vp_stage=vp_stage,
        mtp_block_spec=mtp_block_spec(config, spec, vp_stage) if config.mtp_num_layers else None,
    )
    if share_prompts:
        use_per_token_rotary(model)
    prepare_indexers(model, config)
    set_group_ranking(model, family.group_score_topk)
    for name, sinks in model.named_parameters():
        if name.endswith(".softmax_offset"):  # TransformerEngine makes it in float32
            sinks.data = sinks.data.to(config.params_dtype)
    model.head = head
    on_meta = next(model.parameters()).is_meta
    return model.to(platform.device()) if torch.cuda.is_available() and not on_meta else model
