"""Responses that share one prompt: the policy computes the prompt once.

A micro-batch holds the prompt as a sequence of its own, and after it the responses, each begun by the prompt's last
token. Queries of a response see the keys of the prompt and their own; their positions go on where the prompt's end.
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

from grpo_mp.types import Rows


@dataclass(kw_only=True)
class SharedPromptParams(PackedSeqParams):
    """What Megatron passes on to each layer. The rotary embedding sees one sequence of T tokens, each with its own
    angle; the attention sees `attention`.
    """

    positions: Tensor  # [T]
    longest: int  # the largest position is below it
    key_rows: Tensor  # rows of [T] that each sequence sees, one sequence after the other
    attention: PackedSeqParams


class _Mask(enum.Enum):
    """TransformerEngine's name of a mask that Megatron's enumeration lacks: the last query sees the last key."""

    padding_causal_bottom_right = 1


class SharedPromptAttention(TEDotProductAttention):
    """Core attention in which sequences may see the keys of a prompt before their own."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **more: Any,
    ) -> Tensor:
        """As Megatron's: query [T, h, d], key [T, g, d], value [T, g, e] -> [T, h * e]."""
        if isinstance(packed_seq_params, SharedPromptParams):
            rows, packed_seq_params = packed_seq_params.key_rows, packed_seq_params.attention
            key, value = key.index_select(0, rows), value.index_select(0, rows)
            attn_mask_type = _Mask.padding_causal_bottom_right
        found: Tensor = super().forward(
            query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params, **more
        )
        return found


class RotaryByPosition(torch.nn.Module):
    """A rotary embedding of Megatron's that can be asked for the angle of each token."""

    def __init__(self, table: torch.nn.Module) -> None:
        super().__init__()
        self.table: Any = table

    def get_rotary_seq_len(self, context: Any, block: Any, hidden: Any, config: Any, packed: Any = None) -> Any:
        """How long a table is needed; where prompts are shared, the parameters that say each token's position."""
        if isinstance(packed, SharedPromptParams):
            return packed
        return self.table.get_rotary_seq_len(context, block, hidden, config, packed)

    def forward(self, wanted: Any, **options: Any) -> Any:
        """Angles [length, 1, 1, d] of all positions, or [T, 1, 1, d] of the tokens; yarn adds its scale."""
        if not isinstance(wanted, SharedPromptParams):
            return self.table(wanted, **options)
        found = self.table(wanted.longest, **options)
        if isinstance(found, tuple):
            return found[0].index_select(0, wanted.positions), *found[1:]
        return found.index_select(0, wanted.positions)

    def get_cached_cos_sin(self, wanted: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """The same for cosine and sine, which the fused kernel of latent attention takes."""
        if not isinstance(wanted, SharedPromptParams):
            return self.table.get_cached_cos_sin(wanted, **options)
        cos, sin = self.table.get_cached_cos_sin(wanted.longest, **options)
        return cos.index_select(0, wanted.positions), sin.index_select(0, wanted.positions)


def attend_to_prompts(block: Any) -> Any:
    """A block's specification, each layer with an attention that can share prompts."""
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = SharedPromptAttention
    return block


def rotate_by_position(model: torch.nn.Module) -> None:
    """Give every rotary embedding of a model the angles of single tokens."""
    for module in list(model.modules()):
        table = getattr(module, "rotary_pos_emb", None)
        if isinstance(table, torch.nn.Module):
            module.rotary_pos_emb = RotaryByPosition(table)


def shared_prompt_params(
    lengths: Sequence[int], prompts: Sequence[Rows], positions: Tensor, device: torch.device
) -> SharedPromptParams:
    """Describe sequences of `lengths` tokens, each of which sees the rows of its prompt before its own. Pure."""
    starts = [0, *accumulate(lengths)]
    rows, key_lengths = [], []
    for start, length, prompt in zip(starts, lengths, prompts, strict=False):
        rows += [torch.arange(prompt.start, prompt.start + prompt.count), torch.arange(start, start + length)]
        key_lengths.append(prompt.count + length)
    whole = _bounds([starts[-1]], device)
    return SharedPromptParams(
        **_params(whole, whole, starts[-1], starts[-1]),
        positions=positions.to(device),
        longest=max(key_lengths),
        key_rows=torch.cat(rows).to(device),
        attention=PackedSeqParams(
            **_params(_bounds(lengths, device), _bounds(key_lengths, device), max(lengths), max(key_lengths))
        ),
    )


def _bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)


def _params(queries: Tensor, keys: Tensor, longest_query: int, longest_key: int) -> dict[str, Any]:
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": queries,
        "cu_seqlens_kv": keys,
        "cu_seqlens_q_padded": queries,
        "cu_seqlens_kv_padded": keys,
        "max_seqlen_q": longest_query,
        "max_seqlen_kv": longest_key,
    }
