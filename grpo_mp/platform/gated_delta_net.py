"""Forward pass of Megatron's gated delta net on a CPU, for packed sequences. Import megatron.core first.

Megatron's own forward pass needs flash-linear-attention, which needs a GPU, or `torch_chunk_gated_delta_rule`, whose
loop over the tokens of a chunk makes a train step of a tiny Qwen3.5 mixture take 1.4 times as long. Parameters, their
initialization and their checkpoints stay Megatron's.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_mp.platform.attention import sequence_lengths
from grpo_mp.platform.delta_rule import delta_rule, unit_heads
from grpo_mp.platform.packed_attention import plan_packing, to_cells


def forward(
    layer: Any, hidden_states: Tensor, attention_mask: Tensor | None, *args: Any, packed_seq_params: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Replace `GatedDeltaNet.forward`: map packed hidden states [T, 1, H] to [T, 1, H] (arXiv 2412.06464, eq. 10).

    Every sequence starts from an empty state and an empty convolution window.
    """
    lengths = sequence_lengths(packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_q_padded)
    packing = plan_packing(lengths)
    projected, _ = layer.in_proj(hidden_states)
    cells = to_cells(projected.squeeze(1), packing.queries)
    sizes = [sequences * length for sequences, length, _ in packing.buckets]
    parts = zip(packing.buckets, cells.split(sizes), strict=True)
    mixed = torch.cat(
        [_mix_sequences(layer, part.unflatten(0, (sequences, length))) for (sequences, length, _), part in parts]
    )
    output: tuple[Tensor, Tensor | None] = layer.out_proj(mixed[packing.queries.cell_of_token].unsqueeze(1))
    return output


def _mix_sequences(layer: Any, projected: Tensor) -> Tensor:
    """Return the gated output [n * L, values] of n sequences of equal length L from their projections [n, L, D]."""
    keys, values, heads = (size // layer.tp_size for size in (layer.qk_dim, layer.v_dim, layer.num_value_heads))
    qkv, gate, beta, alpha = projected.split([2 * keys + values, values, heads, heads], dim=-1)
    length = qkv.shape[1]
    convolved = F.silu(layer.conv1d(qkv.transpose(1, 2))[..., :length]).transpose(1, 2)
    query, key, value = convolved.split([keys, keys, values], dim=-1)
    query, key = (unit_heads(x.unflatten(-1, (-1, layer.key_head_dim)), heads) for x in (query, key))
    decay = -layer.A_log.float().exp() * F.softplus(alpha.float() + layer.dt_bias.float())
    mixed = delta_rule(query, key, value.unflatten(-1, (heads, -1)), decay, beta.sigmoid())
    gated: Tensor = layer._apply_gated_norm(mixed, gate.unflatten(-1, (heads, -1)))
    return gated.view(-1, values)
