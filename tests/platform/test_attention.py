"""The core attention module as Megatron calls it; test_packed_attention tests the arithmetic."""

import megatron.core  # noqa: F401
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from grpo_mp.platform.attention import Attention


def attention(**changes) -> Attention:
    fields = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "attention_dropout": 0.0} | changes
    return Attention(TransformerConfig(**fields), attn_mask_type=AttnMaskType.causal, attention_type="self")


def test_batch_equals_each_row():
    query, key, value = (torch.randn(7, 3, 4, 8) for _ in range(3))
    out = attention()(query, key, value, None)
    for row in range(3):
        q, k, v = (x[:, row].transpose(0, 1) for x in (query, key, value))
        expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
        torch.testing.assert_close(out[:, row].double(), expected.transpose(0, 1).flatten(1), rtol=1e-5, atol=1e-6)
