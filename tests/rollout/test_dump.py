"""A file of dumped groups: what was written comes back, and what was damaged is named."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pyarrow.parquet import ParquetFile

from grpo_mp.distributed.layout import IndexerShape
from grpo_mp.rollout.dump import read_facts, read_groups, write_groups
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import NO_TOKEN, KeptTokens, Prompt, Sample, SampleGroup, TopLogprobs
from tests.parallel.inputs import with_keys

PROMPT = Prompt(7, "How much?", (1, 2), "3")
LOGPROB = float(np.float32(-0.1))
PLAIN = Sample(70, 0, PROMPT.tokens, (5, 6), (LOGPROB, -2.0), (1, 2), truncated=True, reward=0.1 + 0.2)
EPISODE = Sample(
    group_id=70,
    index=1,
    prompt_tokens=(1, 2, 9),  # not the group's: the episode was forked
    tokens=(5, 6, 7),
    rollout_logprobs=(LOGPROB, 0.0, -3.0),
    weight_versions=(1, 1, 2),
    truncated=False,
    text="\udc80 half a surrogate",
    reward=-1.0,
    reward_terms={"boxed": 1.0, "answer": 0.0},
    is_scored=False,
    step_rewards=((0, 0.5), (2, -0.25)),
    extra={"first": ["word"]},
    verify_steps=2,
    is_correct=False,
    generated=(True, False, True),
    state="error",
    episode_reward=0.5,
    metrics={"guesses": 2.0},
    messages=({"role": "tool", "content": "\udc80"},),
    error="the tool \udc80 raised",
    teacher_logprobs=(LOGPROB, -2.0, -0.5),
    teacher_prompt=(7, 8),
    role="second",
)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    groups = [
        SampleGroup(PROMPT, (PLAIN, EPISODE)),
        SampleGroup(PROMPT, (replace(PLAIN, group_id=71),), finished=False),
    ]
    write_groups(tmp_path / "a" / "x", groups, {70}, "facts")
    (first, selected), (second, unselected) = read_groups(tmp_path / "a" / "x")
    assert (selected, unselected, read_facts(tmp_path / "a" / "x")) == (True, False, b"facts")
    episode = replace(EPISODE, text="? half a surrogate", error="the tool ? raised")
    assert [first, second] == [SampleGroup(PROMPT, (PLAIN, episode)), groups[1]]
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == ["x"]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_routed_experts_come_back_in_their_type(dtype: type, tmp_path: Path) -> None:
    experts = np.arange(12, dtype=dtype).reshape(3, 2, 2)
    write_groups(tmp_path / "x", [SampleGroup(PROMPT, (replace(PLAIN, routed_experts=experts),))], {}, "")
    ((group, _),) = read_groups(tmp_path / "x")
    read = group.samples[0].routed_experts
    assert read is not None
    assert read.dtype == dtype
    assert np.array_equal(read, experts)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_keys_come_back_beside_experts(dtype: type, tmp_path: Path) -> None:
    indexer = IndexerShape(frozenset((0, 2)), heads=1, head_dim=4, topk=3)
    choices = with_keys(np.arange(20, dtype=dtype).reshape(5, 2, 2), indexer, seed=0)
    write_groups(tmp_path / "x", [SampleGroup(PROMPT, (replace(PLAIN, routed_experts=choices),))], {}, "")
    ((group, _),) = read_groups(tmp_path / "x")
    read = group.samples[0].routed_experts
    assert read is not None
    assert read.dtype == choices.dtype
    assert np.array_equal(read, choices)


def test_a_teachers_top_k_comes_back_bit_for_bit(tmp_path: Path) -> None:
    topk = TopLogprobs(np.array([[3, -1, 5], [7, 8, 2**30]], np.int32), np.array([[-0.1, -2, -3]] * 2, np.float32))
    samples = (replace(PLAIN, teacher_logprobs=(-1.0, -2.0), teacher_topk=topk), replace(PLAIN, index=1))
    write_groups(tmp_path / "x", [SampleGroup(PROMPT, samples)], {}, "")
    ((group, _),) = read_groups(tmp_path / "x")
    read, none = (sample.teacher_topk for sample in group.samples)
    assert none is None
    assert read is not None
    for ours, theirs in ((read.ids, topk.ids), (read.logprobs, topk.logprobs)):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)


def test_kept_tokens_come_back(tmp_path: Path) -> None:
    kept = KeptTokens.of([[3, 7, 5], []])
    write_groups(tmp_path / "x", [SampleGroup(PROMPT, (replace(PLAIN, kept=kept), replace(PLAIN, index=1)))], {}, "")
    ((group, _),) = read_groups(tmp_path / "x")
    assert group.samples[1].kept is None
    assert group.samples[0].kept is not None
    assert group.samples[0].kept.padded(3).tolist() == [[3, 7, 5], [NO_TOKEN] * 3]


def test_a_damaged_page_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x"
    samples = tuple(replace(PLAIN, index=index, tokens=(index * 37, index * 91)) for index in range(40))
    write_groups(file, [SampleGroup(PROMPT, samples)], {}, "facts")
    content = file.read_bytes()
    columns = ParquetFile(file).metadata.row_group(0)
    for column in map(columns.column, range(columns.num_columns)):
        last = (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size - 1
        file.write_bytes(content[:last] + bytes([content[last] ^ 0x10]) + content[last + 1 :])
        with pytest.raises(UserError, match=f"^{file}: damaged"):
            read_groups(file)


def test_a_file_that_is_cut_or_of_something_else_is_refused(tmp_path: Path) -> None:
    write_groups(tmp_path / "x", [SampleGroup(PROMPT, (PLAIN,))], {}, "")
    (tmp_path / "cut").write_bytes((tmp_path / "x").read_bytes()[:-40])
    (tmp_path / "text").write_text("no Parquet")
    for file in (tmp_path / "cut", tmp_path / "text", tmp_path / "missing"):
        for read in (read_facts, read_groups):
            with pytest.raises(UserError, match=f"^{file}: (damaged|No such file)"):
                read(file)
