"""Shared prompts: the policy computes a prompt once for several responses.

A micro-batch has the prompt as its own sequence, followed by the responses, each starting with the prompt's last
token. The queries of a response attend to the keys of both; their positions continue the prompt's.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from grpo_mp.utils.types import RowRange, copy_to


@dataclass(kw_only=True)
class SharedPromptParams(PackedSeqParams):
    """Packing parameters of shared prompts. The inherited fields describe one sequence of T tokens."""

    positions: Tensor  # of the tokens, [T]
    max_positions: int  # upper bound of `positions`
    key_rows: Tensor  # rows of [T] that each sequence attends to, concatenated
    attention: PackedSeqParams  # the real sequences, for core attention


class _Mask(enum.Enum):
    """TransformerEngine's mask that Megatron's enum lacks: causal, with the last query aligned to the last key."""

    padding_causal_bottom_right = 1


class SharedPromptAttention(TEDotProductAttention):
    """Megatron's core attention, in which sequences may also attend to the keys of a shared prompt."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Tensor:
        """Return the attention output [T, h * e] of query [T, h, d], key [T, g, d] and value [T, g, e]."""
        params = options.get("packed_seq_params")
        if isinstance(params, SharedPromptParams):
            key = key.index_select(0, params.key_rows)
            value = value.index_select(0, params.key_rows)
            mask = _Mask.padding_causal_bottom_right
            options |= {"packed_seq_params": params.attention, "attn_mask_type": mask}
        output: Tensor = super().forward(query, key, value, attention_mask, **options)
        return output


class PerTokenRotaryEmbedding(torch.nn.Module):
    """Wrapper of Megatron's rotary embedding that returns angles per token if prompts are shared."""

    def __init__(self, rotary: torch.nn.Module) -> None:
        super().__init__()
        self.rotary: Any = rotary

    def get_rotary_seq_len(self, context: Any, block: Any, hidden: Any, config: Any, packed: Any = None) -> Any:
        """Return the sequence length of the rotary table; with shared prompts return `packed`, for `forward`."""
        if isinstance(packed, SharedPromptParams):
            return packed
        return self.rotary.get_rotary_seq_len(
            context, block, transformer_input=hidden, transformer_config=config, packed_seq_params=packed
        )

    def forward(self, max_seq_len: Any, **options: Any) -> Any:
        """Return the angles by position [length, 1, 1, d], or with shared prompts by token [T, 1, 1, d].

        With yarn, return a pair with its scale. `max_seq_len`: result of `get_rotary_seq_len`.
        """
        if not isinstance(max_seq_len, SharedPromptParams):
            return self.rotary(max_seq_len, **options)
        angles = self.rotary(max_seq_len.max_positions, **options)
        if isinstance(angles, tuple):
            return angles[0].index_select(0, max_seq_len.positions), *angles[1:]
        return angles.index_select(0, max_seq_len.positions)

    def get_cached_cos_sin(self, seq_len: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Return cosine and sine for the fused kernel of latent attention; per token if prompts are shared."""
        if not isinstance(seq_len, SharedPromptParams):
            return self.rotary.get_cached_cos_sin(seq_len, **options)
        cos, sin = self.rotary.get_cached_cos_sin(seq_len.max_positions, **options)
        return cos.index_select(0, seq_len.positions), sin.index_select(0, seq_len.positions)


def use_shared_prompt_attention(block: Any) -> None:
    """Set SharedPromptAttention as the core attention of every layer in a block's spec."""
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = SharedPromptAttention


def use_per_token_rotary(model: torch.nn.Module) -> None:
    """Wrap every rotary embedding of a model in PerTokenRotaryEmbedding."""
    for module in list(model.modules()):
        rotary = getattr(module, "rotary_pos_emb", None)
        if isinstance(rotary, torch.nn.Module):
            module.rotary_pos_emb = PerTokenRotaryEmbedding(rotary)


def shared_prompt_params(
    lengths: Sequence[int], prompts: Sequence[RowRange], positions: Tensor, device: torch.device
) -> SharedPromptParams:
    """Return the packing parameters of a micro-batch with shared prompts.

    `lengths`: tokens of each sequence; `prompts`: rows of the prompt that each sequence also attends to; `positions`
    [T]: of all tokens.
    """
    starts = [0, *accumulate(lengths)]
    rows = []
    key_lengths = []
    for start, length, prompt in zip(starts, lengths, prompts, strict=False):
        rows += [torch.arange(prompt.start, prompt.start + prompt.count), torch.arange(start, start + length)]
        key_lengths.append(prompt.count + length)
    return SharedPromptParams(
        **_thd_fields(starts[-1:], starts[-1:], device),
        positions=copy_to(positions, device),
        max_positions=max(key_lengths),
        key_rows=copy_to(torch.cat(rows), device),
        attention=PackedSeqParams(**_thd_fields(lengths, key_lengths, device)),
    )


def packed_sequences(lengths: Sequence[int], device: torch.device) -> PackedSeqParams:
    """Return Megatron's packing parameters of a micro-batch of sequences with `lengths` tokens."""
    return PackedSeqParams(**_thd_fields(lengths, lengths, device))


def _thd_fields(lengths: Sequence[int], key_lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    queries, keys = (
        copy_to(torch.tensor([0, *accumulate(counts)], dtype=torch.int32), device) for counts in (lengths, key_lengths)
    )
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": queries,
        "cu_seqlens_kv": keys,
        "cu_seqlens_q_padded": queries,  # context parallelism reads these; the lengths include padding
        "cu_seqlens_kv_padded": keys,
        "max_seqlen_q": max(lengths),
        "max_seqlen_kv": max(key_lengths),
    }
