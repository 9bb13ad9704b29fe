"""Rounds of answers, with engines of the test's own: each prompt once, whoever answers it, and nothing waits."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from grpo_mp.config.sections import EngineConfig, RolloutConfig
from grpo_mp.rollout.journal import GroupJournal, load
from grpo_mp.rollout.worker import RolloutTask
from grpo_mp.trainer.sampling.answers import GROUPS, read_recorded
from grpo_mp.trainer.sampling.farm import SampleFarm
from grpo_mp.utils.errors import DiskError
from grpo_mp.utils.types import Prompt, SampleGroup
from tests.rollout.fake_engine import FakeEngine, draw_length, token_of
from tests.trainer.test_collect import MortalEngine, OneRankRollout
from tests.trainer.test_lost_engines import StuckEngine

PROMPTS = 60
LONGEST = 60
GROUP = 3


class WatchedRollout(OneRankRollout):
    """Says which tasks were begun."""

    begun: list[RolloutTask]

    def score(self, groups: Sequence[SampleGroup], step: int) -> Sequence[SampleGroup]:
        """What a lost engine had recorded, and not reported yet, is answered and scored again."""
        return groups

    def begin(self, task: RolloutTask, stream: Any) -> Any:
        self.begun.append(task)
        return super().begin(task, stream)


def make_farm(folder: Path, group: dist.ProcessGroup, engines: Sequence[FakeEngine], concurrent_groups: int = 4) -> Any:
    sizes = {"prompts_per_step": 1, "group_size": GROUP, "max_prompt_tokens": 1, "max_response_tokens": LONGEST}
    config = EngineConfig(concurrent_groups=concurrent_groups)
    rollout = WatchedRollout(list(engines), concurrent_groups)
    rollout.begun = []
    none = lambda: None  # noqa: E731
    parts: Any = SimpleNamespace(
        job=SimpleNamespace(group=group, rank=0, world_size=1, store=dist.HashStore()),
        rollout=rollout,
        phases=SimpleNamespace(phase=lambda *_: nullcontext()),
        monitors=SimpleNamespace(progress=SimpleNamespace(note=lambda _: None)),
        recovery=SimpleNamespace(begin_step=none, run=none, weight_sync=None),
    )
    prompts = [Prompt(number, str(number), (number,)) for number in range(PROMPTS)]
    return SampleFarm(config, RolloutConfig.model_validate(sizes), prompts, parts, GroupJournal(folder / GROUPS, 0))


def check_answers(folder: Path, prompts: Sequence[int] = range(PROMPTS)) -> None:
    """Every prompt has the answers that an engine gives which was never disturbed."""
    recorded = read_recorded(folder, PROMPTS)
    assert sorted(recorded) == sorted(prompts)
    for prompt, record in recorded.items():
        loaded = load(record, Prompt(prompt, str(prompt), (prompt,)))
        assert loaded
        assert isinstance(loaded[0], SampleGroup)
        samples = loaded[0].samples
        assert [(sample.group_id, sample.index) for sample in samples] == [(prompt, i) for i in range(GROUP)]
        for sample in samples:
            length = draw_length(prompt, sample.index, LONGEST)
            assert sample.tokens == tuple(token_of(prompt, sample.index, place) for place in range(length))


@pytest.mark.parametrize(("engines", "concurrent_groups"), [(1, 4), (2, 1), (3, 64)])
def test_all_prompts_are_answered_once(
    tmp_path: Path, one_rank_group: dist.ProcessGroup, engines: int, concurrent_groups: int
) -> None:
    own = [FakeEngine(number, 1e-5 * (number + 1)) for number in range(engines)]
    farm = make_farm(tmp_path, one_rank_group, own, concurrent_groups)
    total = farm.run(set())
    check_answers(tmp_path)
    assert (total.prompts, total.samples) == (PROMPTS, PROMPTS * GROUP)
    assert total.tokens == sum(engine.generated for engine in own)
    assert total.engines == engines
    assert total.tokens_per_s == pytest.approx(total.tokens / total.seconds)


@pytest.mark.parametrize("done", [set(range(1, PROMPTS, 2)), set(range(PROMPTS))])
def test_what_is_done_is_not_asked_again(tmp_path: Path, one_rank_group: dist.ProcessGroup, done: set[int]) -> None:
    farm = make_farm(tmp_path, one_rank_group, [FakeEngine(), FakeEngine(1)])
    assert farm.run(done).prompts == PROMPTS - len(done)
    check_answers(tmp_path, [prompt for prompt in range(PROMPTS) if prompt not in done])


def test_engines_go_on_over_the_end_of_a_round(tmp_path: Path, one_rank_group: dist.ProcessGroup) -> None:
    """Later rounds begin with groups that run, and none that is finished keeps its samples in memory."""
    farm = make_farm(tmp_path, one_rank_group, [FakeEngine(0, 5e-3), FakeEngine(1, 2e-2)])
    farm.run(set())
    begun = farm.engines.rollout.begun
    assert any(task.carried for task in begun)
    assert len(begun) < PROMPTS // 8 + 1  # rounds that others' ends have answered are not begun
    check_answers(tmp_path)


def test_a_lost_engine_leaves_its_prompts_to_the_others(tmp_path: Path, one_rank_group: dist.ProcessGroup) -> None:
    mortal = MortalEngine(1)
    mortal.lives = 9
    make_farm(tmp_path, one_rank_group, [FakeEngine(), mortal]).run(set())
    assert mortal.is_lost
    check_answers(tmp_path)


def test_prompts_that_take_too_long_are_left_out_and_asked_again(
    tmp_path: Path, one_rank_group: dist.ProcessGroup
) -> None:
    farm = make_farm(tmp_path, one_rank_group, [StuckEngine(), StuckEngine(1)])
    assert farm.run(set()).prompts == PROMPTS - 6
    recorded = read_recorded(tmp_path, PROMPTS)
    check_answers(tmp_path, [prompt for prompt in range(PROMPTS) if prompt % 10 != 3])
    make_farm(tmp_path, one_rank_group, [FakeEngine()]).run(recorded.keys())
    check_answers(tmp_path)


def test_answers_that_the_disk_refuses_end_the_sampling(tmp_path: Path, one_rank_group: dist.ProcessGroup) -> None:
    (tmp_path / GROUPS).write_text("a file where a folder should be")
    with pytest.raises(DiskError, match="its answers cannot be written"):
        make_farm(tmp_path, one_rank_group, [FakeEngine()]).run(set())
