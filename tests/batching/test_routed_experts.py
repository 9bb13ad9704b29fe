"""Every row of a micro-batch gets the experts of its own token, and no other; tests/parallel has layouts."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from grpo_mp.batching.exchange import all_gather_sample_info
from grpo_mp.batching.routed_experts import _joined, _outgoing, exchange_routed_experts
from grpo_mp.batching.shared_prompts import SamplePrompt
from grpo_mp.batching.updates import PackingRule, microbatches, plan_updates
from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.coordinates import coordinates
from grpo_mp.utils.types import Prompt, Sample, SampleGroup

LAYERS = 3
TOPK = 2
GROUP = 4


def experts_of(tokens: tuple[int, ...], dtype: type) -> np.ndarray:
    """[tokens - 1, layers, top-k], which tell the token that they belong to."""
    numbers = np.array(tokens[:-1])[:, None, None] + 2 * np.arange(LAYERS)[:, None] + np.arange(TOPK)
    return numbers.astype(dtype)


def make_groups(dtype: type) -> list[SampleGroup]:
    """Five groups with a prompt of their own; the second group, and a sample of the third, came without experts."""
    groups = []
    token = 0
    for group in range(5):
        prompt = tuple(range(token, token + 2 + group))
        token += len(prompt)
        samples = []
        for index in range(GROUP):
            response = tuple(range(token, token + 1 + index * 3))
            token += len(response)
            sample = replace(Sample.from_tokens(group, prompt, response), index=index)
            if group != 1 and (group, index) != (2, 0):
                sample = replace(sample, routed_experts=experts_of(prompt + response, dtype))
            samples.append(sample)
        groups.append(SampleGroup(Prompt(group, "", prompt), tuple(samples)))
    return groups


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
@pytest.mark.parametrize("shares", [False, True])
def test_rows_have_the_experts_of_their_tokens(one_rank_group: dist.ProcessGroup, shares: bool, dtype: type) -> None:
    groups = make_groups(dtype)
    layout = LayoutConfig()
    samples = dict(enumerate(sample for group in groups for sample in group.samples))
    infos = all_gather_sample_info(groups, one_rank_group)
    lengths = [info.total_tokens for info in infos]
    prompts = [SamplePrompt(info.group_id, info.prompt_tokens) for info in infos] if shares else ()
    plan = plan_updates(lengths, 2, PackingRule(layout, 1, 50, 64), list(reversed(range(len(infos)))), prompts)
    job: Any = SimpleNamespace(world_size=1, engine_ranks=0, group=one_rank_group)
    routed = exchange_routed_experts(groups, infos, plan, range(5, 5 + LAYERS), job)
    assert all(sample.routed_experts is None for group in groups for sample in group.samples)
    found_rows = 0
    for update, of_update in zip(plan, routed, strict=True):
        weights = [0.0] * len(update.samples)
        for batch, experts in zip(
            microbatches(update, samples, [0.0] * len(infos), weights, 0, 0), of_update, strict=True
        ):
            assert experts is not None
            tokens = batch.tokens[experts.rows]
            assert np.array_equal(experts.ids.numpy(), experts_of((*tokens.tolist(), 0), dtype))
            assert experts.ids.dtype == (torch.uint8 if dtype is np.uint8 else torch.int16)
            assert len(set(experts.rows.tolist())) == len(experts.rows)
            found_rows += len(experts.rows)
            # All that the loss needs: rows with a target that counts, of samples that have experts.
            counted = batch.mask.bool()
            has = torch.tensor([info.has_routed_experts for info in infos])
            sample = torch.tensor([*(update.samples[i] for i in batch.sample_ids), -1])[batch.sequence_index]
            assert set(experts.rows.tolist()) >= set((counted & has[sample]).nonzero()[:, 0].tolist())
            assert not set(experts.rows.tolist()) & set((counted & ~has[sample]).nonzero()[:, 0].tolist())
    expected_rows = sum(info.total_tokens - 1 for info in infos if info.has_routed_experts)
    assert found_rows < expected_rows if shares else found_rows == expected_rows


def test_a_rank_holds_its_share_and_a_token_crosses_the_network_once() -> None:
    """configs/moe_671b.yaml: 16 nodes of 8 ranks, one engine on the first; its first stage has one layer of experts."""
    layout = LayoutConfig(tensor=4, pipeline=16, context=2, expert=8)
    world_size = 128
    topk = 8
    counts = [1, 3, 3, *[4] * 12, 3]  # layers of experts by stage
    stages = np.split(np.arange(58), np.cumsum(counts)[:-1])
    lengths = [300, 700, 1500, 2500, 4000, 6000]
    (update,) = plan_updates(lengths, 1, PackingRule(layout, 1, 16384, 64))
    draw = np.random.default_rng(0)
    experts = {
        number: draw.integers(0, 256, (lengths[i] - 1, 58, topk), np.uint8) for number, i in enumerate(update.samples)
    }
    places = [coordinates(rank, layout, world_size) for rank in range(world_size)]
    columns = [stages[place.pipeline].tolist() for place in places]
    assert update.schedule.microbatches == 1
    messages = _outgoing(update, 0, experts, columns)
    held = [
        _joined([torch.frombuffer(bytearray(message), dtype=torch.uint8)], len(layers), "|u1", topk)
        for message, layers in zip(messages, columns, strict=True)
    ]
    share = [len(of.rows) * len(layers) * topk for of, layers in zip(held, columns, strict=True)]  # a byte an id
    tokens = sum(lengths)
    assert sum(share) == (tokens - len(lengths)) * 58 * topk
    assert all(of.nbytes <= 1.2 * own for of, own in zip(held, share, strict=True))
    assert sum(map(len, messages[8:])) <= 500 * tokens


def test_a_stage_without_moe_layers_receives_no_experts(one_rank_group: dist.ProcessGroup) -> None:
    groups = make_groups(np.uint8)
    infos = all_gather_sample_info(groups, one_rank_group)
    plan = plan_updates([info.total_tokens for info in infos], 1, PackingRule(LayoutConfig(), 1, 50, 64))
    job: Any = SimpleNamespace(world_size=1, engine_ranks=0, group=one_rank_group)
    (update,) = exchange_routed_experts(groups, infos, plan, layers=(), job=job)
    assert update
    assert all(routed is not None and routed.ids.shape == (0, 0, TOPK) for routed in update)
