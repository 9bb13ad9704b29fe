"""The indexer of a CPU engine against the indexer of transformers, and its mask of a paged attention."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

from grpo_mp.platform.engine_attention import AttentionBatch, paged_attention, plan_attention
from grpo_mp.platform.engine_sparse import best_keys, restrict
from grpo_mp.platform.packed_attention import Softmax

SLOTS = 400
HEADS = 12
CASES = [([5, 40, 17], [5, 40, 17]), ([5, 40, 17], [1, 1, 1]), ([9, 9, 30, 31, 12], [2, 9, 1, 30, 2])]
lengths_and_new = pytest.mark.parametrize(("lengths", "new"), CASES)


def plan_of(lengths: list[int], new: list[int]) -> tuple[list[AttentionBatch], torch.Tensor]:
    slots = torch.randperm(SLOTS)[: 64 * len(lengths)].view(-1, 64)
    return plan_attention(slots, lengths, new, (HEADS, 1), None), slots


def chosen(row: torch.Tensor, position: int) -> set[int]:
    return {place for place in row.tolist() if 0 <= place <= position}


@lengths_and_new
@pytest.mark.parametrize("count", [1, 8, 16, 48])
def test_selects_as_transformers(lengths: list[int], new: list[int], count: int) -> None:
    torch.manual_seed(count)
    sizes = {"index_n_heads": HEADS, "index_head_dim": 16, "qk_rope_head_dim": 8, "index_topk": count}
    config = DeepseekV32Config(hidden_size=24, q_lora_rank=20, **sizes)
    indexer = DeepseekV32Indexer(config, 0).double()
    plan, slots = plan_of(lengths, new)
    keys = torch.full((SLOTS, 16), torch.nan, dtype=torch.float64)
    queries = []
    weights = []
    expected: list[torch.Tensor] = []
    for row, length, last in zip(slots, lengths, new, strict=True):
        x = torch.randn(1, length, 24, dtype=torch.float64)
        q_lora = torch.randn(1, length, 20, dtype=torch.float64)
        unrotated = (torch.ones(1, length, 8), torch.zeros(1, length, 8))
        causal = torch.ones(1, length, length, dtype=torch.bool).tril()
        expected += list(indexer(x, q_lora, unrotated, causal, torch.arange(length)[None])[0, -last:])
        keys[row[:length]] = indexer.k_norm(indexer.wk(x))[0].detach()
        queries.append(indexer.wq_b(q_lora)[0, -last:].view(last, HEADS, 16).detach())
        weights.append(indexer.weights_proj(x)[0, -last:].detach())
        keys[row[length:]] = keys[row[length:]].nan_to_num()  # a slot after the sequence holds a number
    selected = best_keys(torch.cat(queries), torch.cat(weights), keys, plan, count)
    positions = [place for length, last in zip(lengths, new, strict=True) for place in range(length - last, length)]
    for row, reference, position in zip(selected, expected, positions, strict=True):
        assert chosen(row, position) == chosen(reference, position)
        assert (row >= 0).sum() == min(count, position + 1)


def test_the_first_of_equal_scores_wins_whatever_the_batch() -> None:
    query = torch.ones(3, HEADS, 4)
    weights = torch.ones(3, HEADS)
    keys = -torch.ones(SLOTS, 4)  # all scores are 0
    plan, _ = plan_of([60, 40, 20], [1, 1, 1])
    assert best_keys(query, weights, keys, plan, 5).tolist() == [[0, 1, 2, 3, 4]] * 3


@lengths_and_new
def test_attends_to_the_selected_keys_only(lengths: list[int], new: list[int]) -> None:
    plan, slots = plan_of(lengths, new)
    keys = torch.randn(SLOTS, 1, 16)
    query = torch.randn(sum(new), HEADS, 16)
    selected = best_keys(query, torch.randn(sum(new), HEADS), torch.randn(SLOTS, 16), plan, 6)
    output = paged_attention(query, (keys, keys), restrict(plan, selected), Softmax(0.5, None, None))
    owners = [row for row, last in zip(slots, new, strict=True) for _ in range(last)]
    for token, row in enumerate(owners):
        attended = keys[row[selected[token][selected[token] >= 0]], 0].double()
        expected = scaled_dot_product_attention(query[token].double(), attended, attended, scale=0.5)
        torch.testing.assert_close(output[token].double(), expected, atol=1e-5, rtol=1e-5)
