"""Core attention for Megatron on a CPU. Import megatron.core first, which loads this module (see megatron_patches)."""

import math
from itertools import pairwise
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from grpo_mp.platform.packed_attention import Softmax, packed_attention, plan_packing


class Attention(MegatronModule):
    """Core attention with TEDotProductAttention's interface: causal self-attention without dropout.

    With `softmax_type=learnable` the parameter `softmax_offset` [heads] holds the sinks.
    """

    softmax_offset: torch.nn.Parameter | None

    def __init__(
        self,
        config: Any,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        layer_number: int,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout or attention_type != "self" or config.softmax_type == "off-by-one":
            raise NotImplementedError("attention on a CPU has no dropout, no fixed sinks and no cross attention")
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if has_window else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
        self.attn_mask_type = attn_mask_type

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Tensor | None, attn_mask_type: Any = None, **options: Any
    ) -> Tensor:
        """Return causal attention: packed [t, h, d] -> [t, h * e], else [s, b, h, d] -> [s, b, h * e].

        Packed sequences may have more keys than queries; the last query is aligned to the last key. The ignored
        argument is a mask.
        """
        if "causal" not in (attn_mask_type or self.attn_mask_type).name or options.get("attention_bias") is not None:
            raise NotImplementedError("attention on a CPU is causal and has no bias")
        if params := options.get("packed_seq_params"):
            lengths = sequence_lengths(params.cu_seqlens_q, params.cu_seqlens_q_padded)
            key_lengths = sequence_lengths(params.cu_seqlens_kv, params.cu_seqlens_kv_padded)
            prefixes = tuple(keys - queries for keys, queries in zip(key_lengths, lengths, strict=True))
            return self._packed(query, key, value=value, lengths=lengths, prefixes=prefixes).flatten(1)
        s, b = query.shape[:2]
        lengths = (s * self.config.context_parallel_size,) * b
        query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out = self._packed(query, key, value, lengths)
        return out.flatten(1).view(b, s, -1).transpose(0, 1).contiguous()

    def _packed(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], prefixes: tuple[int, ...] = ()
    ) -> Tensor:
        softmax = Softmax(self.scale, self.window, self.softmax_offset)
        if self.cp_group is None:
            return packed_attention(
                query, key, value=value, packing=plan_packing(lengths, prefixes=prefixes), softmax=softmax
            )
        packing = plan_packing(lengths, self.cp_group.size(), self.cp_group.rank())
        # The backward pass of this gather is a reduce-scatter, which sums each token's gradient over all ranks.
        key, value = (gather_from_sequence_parallel_region(x.contiguous(), True, self.cp_group) for x in (key, value))
        return packed_attention(query, key, value=value, packing=packing, softmax=softmax)


def sequence_lengths(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None) -> tuple[int, ...]:
    """Return the lengths of the packed sequences over all context-parallel ranks, padding included."""
    bounds = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    return tuple(end - start for start, end in pairwise(bounds.tolist()))
