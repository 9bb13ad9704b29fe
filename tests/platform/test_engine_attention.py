"""Attention over a paged cache against torch's attention of one sequence at a time."""

from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from grpo_mp.platform import engine_attention
from grpo_mp.platform.engine_attention import paged_attention, plan_attention
from grpo_mp.platform.packed_attention import Softmax

SLOTS = 400


@dataclass(frozen=True)
class Attention:
    """Inputs of `plan_attention` and `paged_attention`."""

    query: torch.Tensor
    cache: tuple[torch.Tensor, torch.Tensor]
    slots: torch.Tensor
    lengths: list[int]
    new_tokens: list[int]
    softmax: Softmax

    def paged(self) -> torch.Tensor:
        heads = (self.query.shape[1], self.cache[0].shape[1])
        plan = plan_attention(self.slots, self.lengths, self.new_tokens, heads, self.softmax.window)
        return paged_attention(self.query, self.cache, plan, self.softmax)

    def per_sequence(self) -> torch.Tensor:
        """Return torch's attention in float64, one sequence at a time; a sink is one more key, of value 0."""
        keys, values = self.cache
        softmax = self.softmax
        outputs = []
        queries = self.query.split(self.new_tokens)
        for new_query, row, length, new in zip(queries, self.slots, self.lengths, self.new_tokens, strict=True):
            k = keys[row[:length]].double()
            v = values[row[:length]].double()
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            if softmax.window is not None:
                mask = mask.triu(1 - softmax.window)
            q, k, v = (tensor.transpose(0, 1)[None] for tensor in (new_query.double(), k, v))
            bias = torch.zeros(q.shape[1], new, length + 1, dtype=torch.float64)
            bias[..., :-1].masked_fill_(~mask[length - new :], -torch.inf)
            bias[..., -1] = -torch.inf if softmax.sinks is None else softmax.sinks.double()[:, None]
            k, v = (pad(tensor, (0, 0, 0, 1)) for tensor in (k, v))
            output = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=softmax.scale, enable_gqa=True)
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs).to(self.query.dtype)


@pytest.mark.parametrize(("heads", "groups", "size", "value_size"), [(4, 2, 8, 8), (4, 1, 12, 8), (3, 3, 4, 4)])
@pytest.mark.parametrize(
    ("lengths", "new_tokens"),
    [
        ([1], [1]),
        ([5, 40, 17], [5, 40, 17]),
        ([5, 40, 17], [1, 1, 1]),
        ([9, 9, 30, 31, 12], [2, 9, 1, 30, 2]),
    ],
)
@pytest.mark.parametrize("limit", [1, 300])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (4, True)])
def test_equals_attention_per_sequence(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    groups: int,
    size: int,
    value_size: int,
    lengths: list[int],
    new_tokens: list[int],
    limit: int,
    latent: bool,
    window: int | None,
    has_sinks: bool,
) -> None:
    monkeypatch.setattr(engine_attention, "MAX_SCORES", limit)
    torch.manual_seed(0)
    query = torch.randn(sum(new_tokens), heads, size)
    keys = torch.randn(SLOTS, groups, size)
    values = torch.randn(SLOTS, groups, value_size)
    if latent:
        values = keys[..., :value_size]
    slots = torch.stack([torch.randperm(SLOTS)[:64] for _ in lengths])
    softmax = Softmax(0.3, window, torch.randn(heads) if has_sinks else None)
    attention = Attention(query, (keys, values), slots, lengths=lengths, new_tokens=new_tokens, softmax=softmax)
    torch.testing.assert_close(attention.paged(), attention.per_sequence(), atol=2e-6, rtol=1e-5)


def test_bfloat16_cache() -> None:
    torch.manual_seed(0)
    query = torch.randn(3, 4, 8, dtype=torch.bfloat16)
    keys, values = (torch.randn(SLOTS, 2, 8, dtype=torch.bfloat16) for _ in range(2))
    slots = torch.stack([torch.randperm(SLOTS)[:64] for _ in range(3)])
    attention = Attention(query, (keys, values), slots, lengths=[64, 3, 20], new_tokens=[1, 1, 1], softmax=Softmax(0.3))
    output = attention.paged()
    assert output.dtype is torch.bfloat16
    torch.testing.assert_close(output, attention.per_sequence(), atol=2e-2, rtol=2e-2)
