"""The core attention module as Megatron calls it; test_packed_attention tests the arithmetic."""

import megatron.core  # noqa: F401
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from grpo_mp.platform.attention import Attention


def attention(**changes) -> Attention:
    fields = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "attention_dropout": 0.0} | changes
    return Attention(TransformerConfig(**fields), 1, AttnMaskType.causal, "self")


def test_batch_equals_each_row():
    query, key, value = (torch.randn(7, 3, 4, 8) for _ in range(3))
    out = attention()(query, key, value, None)
    for row in range(3):
        q, k, v = (x[:, row].transpose(0, 1) for x in (query, key, value))
        expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
        torch.testing.assert_close(out[:, row].double(), expected.transpose(0, 1).flatten(1), rtol=1e-5, atol=1e-6)


def test_packed_sequences_equal_a_batch():
    query, key, value = (torch.randn(7, 3, 4, 8) for _ in range(3))
    bounds = torch.tensor([0, 7, 14, 21], dtype=torch.int32)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    batch = attention()(query, key, value, None)
    rows = [x.transpose(0, 1).flatten(0, 1) for x in (query, key, value)]
    packed = attention()(*rows, None, packed_seq_params=params, attn_mask_type=AttnMaskType.padding_causal)
    torch.testing.assert_close(packed.unflatten(0, (3, 7)).transpose(0, 1), batch)
