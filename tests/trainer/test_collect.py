"""Steps of rollouts from the stream: which groups are trained on, what is carried, with engines of the test's own."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from grpo_mp.algorithms.selection import Curriculum
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.checkpoint.run_state import TrainState
from grpo_mp.config.sections import EngineConfig, RolloutConfig
from grpo_mp.data.cursor import PromptQueue
from grpo_mp.data.prompts import PromptSet
from grpo_mp.distributed.rendezvous import FAILURE, is_first_failure
from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.rollout.groups import EndedGroup, LaunchedGroups
from grpo_mp.rollout.stream import GroupStream
from grpo_mp.rollout.worker import RolloutTask, RolloutWorker, give_back, pause_running
from grpo_mp.trainer.collect import RolloutBatch, RolloutCollector
from grpo_mp.utils.background import EventLoopThread
from grpo_mp.utils.errors import EngineError, UserError
from grpo_mp.utils.types import Prompt, SampleGroup, SampleInfo
from tests.rollout.fake_engine import FakeEngine, draw_length, token_of
from tests.virtual_time import VirtualLoop

PROMPTS = 400
LONGEST = 60
GROUP = 3


class FakeScorer:
    def score_group(self, group: SampleGroup, step: int) -> SampleGroup:
        solved = group.prompt.index % 3 == 0
        scored = (replace(one, reward=float(len(one.tokens) % 2), is_correct=solved) for one in group.samples)
        return replace(group, samples=tuple(scored))

    def take_stats(self) -> RewardStats:
        return RewardStats()

    def with_own_stats(self) -> "FakeScorer":
        return self


class FakeTokenizer:
    get_added_vocab = dict

    def batch_decode(self, tokens: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, response)) for response in tokens]


class MortalEngine(FakeEngine):
    """It is lost after some requests, and all that it runs with it."""

    lives = 0  # 0: it is never lost
    is_lost = False

    async def generate(self, *arguments: Any, **more: Any) -> Any:
        self.lives -= 1
        if self.lives == 0 or self.is_lost:
            self.is_lost = True
            raise EngineError(f"engine {self.index}: gone")
        outputs = await super().generate(*arguments, **more)
        if self.is_lost:
            raise EngineError(f"engine {self.index}: gone")
        return outputs


@dataclass
class OneRankRollout:
    """All engines of the job on one rank."""

    engines: list[FakeEngine]
    slots: int
    loop: EventLoopThread = field(default_factory=lambda: EventLoopThread("engines"))
    routing: None = None
    client: None = None
    group_timeout_s: float = 60.0
    scored: set[int] = field(default_factory=set)

    @property
    def host_ranks(self) -> tuple[int, ...]:
        return tuple(range(len(self.engines)))

    def score(self, groups: Sequence[SampleGroup], step: int) -> Sequence[SampleGroup]:
        """No group is asked about twice: carried ones are scored when a step takes them."""
        ids = [group.samples[0].group_id for group in groups if group.finished and group.samples]
        assert not self.scored & set(ids)
        self.scored.update(ids)
        return groups

    def take_load(self) -> dict[str, float]:
        return {}

    def ask_teachers(self, groups: Sequence[SampleGroup]) -> Sequence[SampleGroup]:
        return groups

    def pause(self, launched: LaunchedGroups) -> dict[int, EndedGroup]:
        everywhere: Any = SimpleNamespace(abort_all=self._abort_all)
        return self.loop.run(pause_running(everywhere, launched))

    async def _abort_all(self) -> None:
        for engine in self.engines:
            await engine.abort_all()

    def lose(self, error: EngineError) -> None:
        if not any(isinstance(engine, MortalEngine) for engine in self.engines):
            raise error

    def begin(self, task: RolloutTask, stream: GroupStream) -> Future[LaunchedGroups]:
        tokenizer: Any = FakeTokenizer()
        alive = [engine for engine in self.engines if not getattr(engine, "is_lost", False)]
        for _ in range(len(self.engines) - len(alive) - (not alive)):
            stream.report_lost()
        if not alive:
            return self.loop.submit(give_back(task, stream))
        parts: Any = [(engine, FakeScorer(), tokenizer, self.group_timeout_s, self.lose) for engine in alive]
        workers = [RolloutWorker(*part) for part in parts]
        carried = [dict[int, Any]() for _ in workers]
        for number, group in task.carried.items():
            carried[number % len(workers)][number] = group

        async def run_all() -> LaunchedGroups:
            tasks = [replace(task, carried=own) for own in carried]
            pairs = zip(workers, tasks, strict=True)
            merged: dict[int, Any] = {}
            for groups in await asyncio.gather(*(worker.run(own, stream, self.slots) for worker, own in pairs)):
                assert not merged.keys() & groups.keys()
                merged |= groups
            return merged

        return self.loop.submit(run_all())


def lengths_differ(samples: Sequence[SampleInfo]) -> bool:
    return len({sample.response_tokens % 2 for sample in samples}) > 1


def collector(
    one_rank_job: Any,
    engines: list[FakeEngine],
    slots: int,
    filter_: dict[str, Any],
    schedule: str = "colocated",
    steps: int = 100,
    folder: Path | None = None,
    skips_solved: bool = False,
    curriculum: Curriculum | None = None,
    virtual_time: bool = False,
    **rollout: Any,
) -> Any:
    config = RolloutConfig.model_validate(
        {"prompts_per_step": 8, "group_size": GROUP, "max_prompt_tokens": 1, "max_response_tokens": LONGEST} | rollout
    )
    prompts = PromptSet("test", [tuple(Prompt(i, str(i), (i,)) for i in range(PROMPTS))])
    phases: Any = SimpleNamespace(phase=lambda *_: nullcontext())
    rates = {"window": 1, "max_rate": 0.99} if skips_solved else {}
    algorithm = AlgorithmConfig.model_validate({"filter": filter_, "curriculum": rates})
    job: Any = SimpleNamespace(group=one_rank_job.group)
    # streams' names are new in each
    job.store = dist.HashStore()
    job.rank = 0
    job.world_size = 1
    job.engine_ranks = 0
    settings: Any = SimpleNamespace(rollout=config, algorithm=algorithm, shares_devices=schedule == "colocated")
    settings.data = SimpleNamespace(shuffle=False)
    settings.run = SimpleNamespace(seed=0, steps=steps, folder=folder or one_rank_job.new_folder())
    settings.engine = EngineConfig()
    settings.optimizer_steps_per_step = 1
    settings.steps_ahead = config.max_staleness - (schedule != "colocated")
    settings.updates_running_groups = schedule == "async" and config.tokens_ahead is None
    rollouts: Any = OneRankRollout(engines, slots)
    if virtual_time:  # for colocated engines, which generate while the step waits for them
        rollouts.loop = VirtualLoop()
    scorer: Any = FakeScorer()
    recovery: Any = SimpleNamespace(run=lambda: None, begin_step=lambda: None, end_generation=lambda: None)
    return RolloutCollector(settings, prompts, rollouts, scorer, job, phases, lengths_differ, recovery, curriculum)


def each_step(collect: RolloutCollector, engines: Sequence[Any], steps: int) -> Iterator[tuple[int, RolloutBatch]]:
    """Yield the number and the groups of each step; when the caller has trained on them, engines get new weights."""
    state = TrainState()
    for step in range(1, steps + 1):
        batch = collect.collect(state, step)
        yield step, batch
        state = replace(batch.state, step=step, optimizer_step=step)
        if not collect.settings.updates_running_groups:
            collect.finish_generation()
        for engine in engines:
            engine.version = step
        collect.synced_step = step


def run_steps(collect: RolloutCollector, engines: list[FakeEngine], steps: int) -> list[RolloutBatch]:
    return [batch for _, batch in each_step(collect, engines, steps)]


def check_samples(batch: RolloutBatch) -> None:
    """Each response is the one that an engine gives which was never interrupted."""
    for group in batch.groups:
        assert [sample.index for sample in group.samples] == list(range(GROUP))
        for sample in group.samples:
            (prompt,) = sample.prompt_tokens
            length = draw_length(prompt, sample.index, LONGEST)
            assert sample.tokens == tuple(token_of(prompt, sample.index, place) for place in range(length))
            assert sample.rollout_logprobs == tuple(-0.001 * token for token in sample.tokens)
            assert list(sample.weight_versions) == sorted(sample.weight_versions)
            assert sample.truncated == (length == LONGEST)


def kept(prompt: int) -> bool:
    return len({draw_length(prompt, index, LONGEST) % 2 for index in range(GROUP)}) > 1


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_steps_train_on_the_prompts_in_their_order_whoever_is_faster(one_rank_job: Any, max_staleness: int) -> None:
    engines = [FakeEngine(0, 1e-4), FakeEngine(1, 3e-3)]
    rule = {"zero_std": "refill"}
    collect = collector(one_rank_job, engines, 12, rule, virtual_time=True, max_staleness=max_staleness)
    batches = run_steps(collect, engines, 8)
    trained = [[group.prompt.index for group in batch.groups] for batch in batches]
    expected = [prompt for prompt in range(PROMPTS) if kept(prompt)][: 8 * len(batches)]
    assert [prompt for indices in trained for prompt in sorted(indices)] == expected
    ids = [group.samples[0].group_id for batch in batches for group in batch.groups]
    assert len(set(ids)) == len(ids)
    for step, batch in enumerate(batches):
        check_samples(batch)
        assert min(info.oldest_version for info in batch.infos) >= step - max_staleness
        assert batch.length_bias > 0
    carried = [batch.carried for batch in batches]
    assert all(carried) if max_staleness else not any(carried)
    mixed = [s for batch in batches for group in batch.groups for s in group.samples if len(set(s.weight_versions)) > 1]
    assert bool(mixed) == bool(max_staleness)


def test_groups_of_weights_that_are_too_old_are_counted_and_generated_again(one_rank_job: Any) -> None:
    """As where a step makes more updates than settings say."""
    engines = [FakeEngine()]
    collect = collector(one_rank_job, engines, 12, {}, virtual_time=True, max_staleness=1)
    batch = collect.collect(TrainState(), 1)
    begun = [
        group
        for group in collect._carried.values()
        if isinstance(group, SampleGroup) or any(output.tokens for output in group.outputs)
    ]
    assert (len(begun) > 0, batch.dropped["stale"]) == (True, 0)
    engines[0].version = 5
    later = collect.collect(replace(batch.state, step=1, optimizer_step=5), 2)
    assert later.dropped["stale"] == len(begun)
    check_samples(later)
    assert {version for group in later.groups for one in group.samples for version in one.weight_versions} == {5}


def test_data_that_cannot_fill_a_step_is_an_error(one_rank_job: Any) -> None:
    collect = collector(one_rank_job, [FakeEngine()], 16, {"zero_std": "refill"}, group_size=1)
    with pytest.raises(UserError, match=r"step 1: of 80 groups only 0 pass algorithm\.filter\.metric=reward, 8 are"):
        collect.collect(TrainState(), 1)


def test_a_rank_does_not_wait_for_groups_of_one_that_failed(one_rank_job: Any) -> None:
    collect = collector(one_rank_job, [FakeEngine(token_s=0.05)], 1, {})
    assert is_first_failure(collect.job.store, FAILURE)
    with pytest.raises(UserError, match="another rank failed"):
        collect.collect(TrainState(), 1)


@pytest.mark.parametrize(("schedule", "max_staleness"), [("one_step_off", 1), ("async", 1), ("async", 3)])
@pytest.mark.parametrize("seed", range(2))
def test_what_engines_of_their_own_generate_is_neither_lost_nor_older_than_allowed(
    one_rank_job: Any, schedule: str, max_staleness: int, seed: int
) -> None:
    """Engines of random speeds generate ahead, and take new weights after random delays."""
    random = Random(f"{schedule}/{max_staleness}/{seed}")
    steps = 12
    engines = [FakeEngine(index, random.uniform(5e-5, 5e-4)) for index in range(2)]
    collect = collector(
        one_rank_job, engines, 8, {"zero_std": "refill"}, schedule=schedule, steps=steps, max_staleness=max_staleness
    )
    trained = []
    for step, batch in each_step(collect, engines, steps):
        check_samples(batch)
        versions = [version for group in batch.groups for one in group.samples for version in one.weight_versions]
        assert step - 1 - min(versions) <= max_staleness
        if schedule == "one_step_off" and step > 2:
            assert set(versions) == {step - 2}
        trained += [group.prompt.index for group in batch.groups]
        time.sleep(random.uniform(0, 0.03))  # the policy is updated
    in_order = [number % PROMPTS for number in range(2 * PROMPTS) if kept(number % PROMPTS)]
    assert trained == in_order[: len(trained)]


@pytest.mark.parametrize(
    ("schedule", "max_staleness"), [("colocated", 1), ("colocated", 3), ("async", 2), ("async", 4)]
)
@pytest.mark.parametrize("seed", range(2))
def test_with_a_budget_of_tokens_the_clock_decides_nothing(
    one_rank_job: Any, schedule: str, max_staleness: int, seed: int
) -> None:
    """The weights of every token are those that the rule says, whatever the speeds of engines and trainer."""
    random = Random(seed)
    steps = 7
    budget = 9
    colocated = schedule == "colocated"
    engines = [FakeEngine(index, random.uniform(5e-5, 5e-4)) for index in range(2)]
    ahead = {"max_staleness": max_staleness, "tokens_ahead": budget}
    collect = collector(one_rank_job, engines, 8, {}, schedule=schedule, steps=steps, **ahead)
    begun = max_staleness - (not colocated)  # steps before its own
    assert collect.settings.steps_ahead == begun

    def version_of(place: int, step: int) -> int:
        """Of a token that is trained on in a step: those up to the budget, the last of which is drawn again."""
        of_step = (t for t in range(max(1, step - begun), step) if place < budget * (begun - (step - t) + 1) - 1)
        return max(0, next(of_step, step) - (1 if colocated else 2))

    carried = []
    mixed = 0
    for step, batch in each_step(collect, engines, steps):
        check_samples(batch)
        assert [group.prompt.index for group in batch.groups] == list(range(8 * (step - 1), 8 * step))
        for one in (sample for group in batch.groups for sample in group.samples):
            assert one.weight_versions == tuple(version_of(place, step) for place in range(len(one.tokens)))
            mixed += len(set(one.weight_versions)) > 1
        carried.append(batch.carried)
        time.sleep(random.uniform(0, 0.03))  # the policy is updated
    assert carried == [8 * min(begun, steps - step) for step in range(1, steps + 1)]
    assert mixed > 20


def third_rests(samples: Sequence[SampleInfo], step: int) -> dict[int, int]:
    return {sample.prompt: step + 50 for sample in samples if sample.prompt % 3 == 0}


@pytest.mark.parametrize("rule", [{"skips_solved": True}, {"curriculum": third_rests}], ids=["solved", "own"])
def test_which_prompts_are_skipped_does_not_depend_on_who_was_faster(one_rank_job: Any, rule: dict[str, Any]) -> None:
    """Every third prompt is solved at once, or named by a function, and left out of the next epoch."""

    def trained(token_s: float, pause_s: float) -> list[int]:
        engine = FakeEngine(token_s=token_s)
        collect = collector(one_rank_job, [engine], 12, {}, schedule="async", max_staleness=2, **rule)
        collect._queue = PromptQueue(40, shuffle=False)
        prompts = list[int]()
        for _, batch in each_step(collect, [engine], 10):
            prompts += [group.prompt.index for group in batch.groups]
            time.sleep(pause_s)
        return prompts

    slow = trained(1e-3, 0.0)
    fast = trained(2e-5, 0.1)
    assert slow == fast
    assert len(set(slow[40:])) < len(set(slow[:40]))
