"""The exchange of samples in a job of one rank; tests/parallel has jobs of several."""

from dataclasses import replace

import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_mp.batching.exchange import all_gather_sample_info, gather_groups, redistribute
from grpo_mp.utils.types import Prompt, Sample, SampleGroup, SampleInfo

TOKENS = st.lists(st.integers(0, 2**31), min_size=1, max_size=8)


@st.composite
def random_sample(draw: st.DrawFn) -> Sample:
    tokens = draw(TOKENS)
    exact = st.floats(-100, 0, width=32)
    return Sample(
        group_id=draw(st.integers(0, 2**40)),
        index=draw(st.integers(0, 100)),
        prompt_tokens=tuple(draw(st.lists(st.integers(0, 2**31), max_size=8))),
        tokens=tuple(tokens),
        rollout_logprobs=tuple(draw(exact) for _ in tokens),
        weight_versions=tuple(draw(st.integers(0, 2**20)) for _ in tokens),
        truncated=draw(st.booleans()),
        teacher_logprobs=tuple(draw(exact) for _ in tokens) if draw(st.booleans()) else (),
    )


@given(st.dictionaries(st.tuples(st.integers(0, 2**40), st.integers(0, 100)), random_sample(), max_size=4))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_samples_arrive_as_they_were(one_rank_group: dist.ProcessGroup, drawn: dict[tuple[int, int], Sample]) -> None:
    samples = {key: replace(sample, group_id=key[0], index=key[1]) for key, sample in drawn.items()}
    groups = [SampleGroup(Prompt(0, "question", (1,)), tuple(samples.values()))]
    assert redistribute(groups, {0: list(samples)}, one_rank_group, one_rank_group, 0) == samples


def make_group(group_id: int) -> SampleGroup:
    parts = {"answer": 1.0}
    sample = Sample(group_id, 0, (1, 2), (3, 4, 5), (-0.5, -0.25, 0.0), (4, 2, 3), True, "text", 1.5, parts)
    return SampleGroup(Prompt(0, "question", (1, 2)), (replace(sample, index=1), sample))


def test_infos_and_samples_in_a_job_of_one_rank(one_rank_group: dist.ProcessGroup) -> None:
    groups = [make_group(7), make_group(3)]
    infos = all_gather_sample_info(groups, one_rank_group)
    assert [info.key for info in infos] == [(3, 0), (3, 1), (7, 0), (7, 1)]
    parts = {"answer": 1.0}
    assert infos[0] == SampleInfo(3, 0, 2, 3, 1.5, True, oldest_version=2, reward_terms=parts, versions_sum=9)
    assert infos[0].total_tokens == 5
    assert gather_groups(groups, {3, 8}, one_rank_group) == [groups[1]]
    keys_by_rank = {0: [(7, 1), (3, 0)]}
    received = redistribute(groups, keys_by_rank, one_rank_group, one_rank_group, 0)
    expected = {(7, 1): groups[0].samples[0], (3, 0): groups[1].samples[1]}
    assert received == {key: replace(sample, text="", reward=0.0, reward_terms={}) for key, sample in expected.items()}
