"""What a stopped or killed job has generated is taken up by the one that resumes, with engines of the test's own."""

import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_mp.batching.group_selection import AdmissionRule
from grpo_mp.checkpoint.run_state import MANIFEST, TrainState
from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.rollout.groups import PausedGroup
from grpo_mp.rollout.journal import GroupJournal, best_records, load, read_records
from grpo_mp.rollout.stream import GroupStream
from grpo_mp.rollout.worker import RolloutTask
from grpo_mp.trainer import collect as collect_module
from grpo_mp.trainer import recorded as recorded_module
from grpo_mp.trainer.collect import RolloutCollector
from grpo_mp.trainer.recorded import RecordedGroups
from grpo_mp.utils.files import write_json
from grpo_mp.utils.types import Prompt, Sample, SampleGroup
from tests.rollout.fake_engine import FakeEngine
from tests.trainer.test_collect import GROUP, PROMPTS, check_samples, collector, kept

# Of jobs that are killed: steps since the last checkpoint
STEPS = 9
SLOTS = 6
DONE_WHEN_KILLED = (1, 4, 0, 2)


@pytest.mark.parametrize("collected", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("schedule", "max_staleness"), [("colocated", 0), ("colocated", 2), ("one_step_off", 1), ("async", 2)]
)
def test_a_stopped_job_goes_on_with_what_it_had_begun(
    one_rank_job: Any, tmp_path: Path, schedule: str, max_staleness: int, collected: bool
) -> None:
    """It is stopped several times, before or after a step's groups are collected, which the next job repeats."""
    engine = FakeEngine(token_s=5e-4)
    state = TrainState()
    trained = list[int]()
    tokens = 0
    for job in range(4):
        places = {"schedule": schedule, "folder": tmp_path, "max_staleness": max_staleness}
        collect = collector(one_rank_job, [engine], 12, {"zero_std": "refill"}, **places)
        collect.synced_step = state.step
        for step in range(2 * job + 1, 2 * job + 3):
            batch = collect.collect(state, step)
            check_samples(batch)
            assert step - 1 - min(info.oldest_version for info in batch.infos) <= max_staleness
            trained += [group.prompt.index for group in batch.groups]
            tokens += sum(info.response_tokens for info in batch.launched)
            state = replace(batch.state, step=step, optimizer_step=step)
            if schedule == "one_step_off":
                collect.finish_generation()
            engine.version = collect.synced_step = step
        if collected:
            collect.collect(state, 2 * job + 3)
        collect.stop()
    assert trained == [prompt for prompt in range(PROMPTS) if kept(prompt)][: len(trained)]
    assert len(trained) == 8 * 8
    recorded = best_records(record for file in tmp_path.glob("rollouts/*/*") for record in read_records(file))
    ahead = sum(record.extent.tokens for record in recorded.values() if record.key[0] >= state.groups_launched)
    assert tokens + ahead == engine.generated


@dataclass
class CountingEngine(FakeEngine):
    """It counts the groups and rests that it was asked for."""

    requests: int = 0

    async def generate(self, *arguments: Any, **more: Any) -> Any:
        self.requests += 1
        return await super().generate(*arguments, **more)


def run_and_kill(
    one_rank_job: Any, folder: Path, rng: Random | None, schedule: str, max_staleness: int
) -> tuple[dict[int, list[Any]], int]:
    """Run STEPS steps with a checkpoint every 3; with `rng` kill jobs at random moments of a step.

    Returns what each step trained on, and the requests to engines. Those of a killed job go on for nobody.
    """
    trained = dict[int, list[Any]]()
    saved = TrainState()
    requests = 0
    kills = 0
    while saved.step < STEPS:
        engine = CountingEngine(token_s=2e-5)
        state = saved
        collect = collector(
            *(one_rank_job, [engine], SLOTS, {"zero_std": "refill"}),
            **{"schedule": schedule, "folder": folder, "max_staleness": max_staleness, "steps": STEPS},
        )
        engine.version = collect.synced_step = state.step
        last = state.step + DONE_WHEN_KILLED[kills] if rng and kills < len(DONE_WHEN_KILLED) else STEPS
        while state.step < STEPS and state.step < last:
            step = state.step + 1
            batch = collect.collect(state, step)
            check_samples(batch)
            assert step - 1 - min(info.oldest_version for info in batch.infos) <= max_staleness
            rows = [(s.prompt_tokens, s.tokens, s.reward) for g in batch.groups for s in g.samples]
            assert trained.setdefault(step, sorted(rows)) == sorted(rows)
            state = replace(batch.state, step=step, optimizer_step=step)
            if schedule == "one_step_off":
                collect.finish_generation()
            engine.version = collect.synced_step = step
            if step % 3 == 0:
                saved = state
                write_json(folder / f"checkpoints/step_{step:06d}/{MANIFEST}", {})
        if state.step < STEPS:  # in the middle of a step
            with ThreadPoolExecutor() as pool:
                rest = pool.submit(collect.collect, state, state.step + 1)
                time.sleep(rng.uniform(0, 0.02) if rng else 0)
                collect._journal.append = lambda *_: None  # what ends now is not on disk
                requests += engine.requests
                kills += 1
                rest.result()
                collect.stop()
        else:
            requests += engine.requests
    return trained, requests


@pytest.mark.parametrize(
    ("schedule", "max_staleness"), [("colocated", 0), ("colocated", 2), ("one_step_off", 1), ("async", 2)]
)
def test_a_killed_job_generates_again_only_what_was_running(
    one_rank_job: Any, tmp_path: Path, schedule: str, max_staleness: int
) -> None:
    """And trains on what the undisturbed job trains on, in repeated steps too."""
    undisturbed, least = run_and_kill(one_rank_job, tmp_path / "undisturbed", None, schedule, max_staleness)
    rng = Random(f"kills/{schedule}/{max_staleness}")
    killed, requests = run_and_kill(one_rank_job, tmp_path / "killed", rng, schedule, max_staleness)
    assert killed == undisturbed
    if not max_staleness:  # else some are paused and asked for again
        assert requests <= least + len(DONE_WHEN_KILLED) * SLOTS
    folders = sorted(folder.name for folder in (tmp_path / "killed/rollouts").iterdir())
    assert len(folders) <= 2 * 3 + max_staleness + 1
    assert folders[0] <= "step_000004"  # what a start needs that finds the checkpoint of 6 damaged


def test_episodes_that_had_ended_are_taken_up(one_rank_job: Any, tmp_path: Path) -> None:
    """By a job after a kill, and by an engine after another's loss, also where no group is begun before its step."""

    class KilledError(Exception):
        pass

    ended = Sample(2, 1, (2,), (5, 6), (-1.0, -1.0), (0, 0), False, state="completed", generated=(True, True))
    tasks = list[RolloutTask]()

    def begin(task: RolloutTask, stream: GroupStream) -> Any:
        tasks.append(task)
        task.record_part(2, PausedGroup(task.prompt_of(2), samples=(ended,)))
        raise KilledError

    for _ in range(2):
        collect = collector(one_rank_job, [FakeEngine()], 6, {}, folder=tmp_path, function="openai_agent")
        collect.rollout.begin = begin
        with pytest.raises(KilledError):
            collect.collect(TrainState(), 1)
    group = PausedGroup(tasks[0].prompt_of(2), samples=(ended,))
    assert [dict(task.carried) for task in tasks] == [{}, {2: group}]
    assert tasks[1].recall(2, group.prompt) == group


def test_no_record_is_taken_up_of_a_group_that_another_rank_has_begun_anew(
    one_rank_job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a step launched it in place of one that took too long: two ranks would have the same group."""

    class BegunError(Exception):
        pass

    def begin(task: RolloutTask, stream: GroupStream) -> Any:
        tasks.append(task)
        raise BegunError

    def next_step(state: TrainState) -> RolloutCollector:
        collect = collector(one_rank_job, [FakeEngine()], 12, {}, folder=tmp_path, max_staleness=1)
        collect.rollout.begin = begin
        with pytest.raises(BegunError):
            collect.collect(state, 2)
        return collect

    tasks = list[RolloutTask]()
    stopped = collector(one_rank_job, [FakeEngine()], 12, {}, folder=tmp_path, max_staleness=1)
    batch = stopped.collect(TrainState(), 1)
    stopped.stop()
    state = replace(batch.state, step=1, optimizer_step=1)
    next_step(state)
    begun = min(tasks[0].carried)
    monkeypatch.setattr(
        collect_module, "all_gather", lambda value, _: [value, {begun}] if isinstance(value, set) else [value]
    )
    collect = next_step(state)
    assert tasks[1].carried.keys() == tasks[0].carried.keys() - {begun}
    assert tasks[1].carried_by_all == tasks[0].carried_by_all
    assert state.groups_launched + begun not in collect._stats


class Exchange:
    """Ranks that are threads: what each gives to a collective, by rank."""

    def __init__(self, ranks: int) -> None:
        self._barrier = Barrier(ranks)
        self._given = [None] * ranks

    def all_gather(self, value: Any, rank: int) -> list[Any]:
        self._given[rank] = pickle.loads(pickle.dumps(value))
        self._barrier.wait(60)
        gathered = list(self._given)
        self._barrier.wait(60)
        return gathered


def read_by(readers: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[RecordedGroups]:
    """Read a folder as so many ranks do, each in a thread; their group is the rank's number."""
    monkeypatch.setattr(recorded_module, "all_gather", Exchange(readers).all_gather)
    monkeypatch.setattr(recorded_module, "dist", SimpleNamespace(get_rank=lambda rank: rank))
    ranks: Any = range(readers)
    with ThreadPoolExecutor(readers) as pool:
        return list(pool.map(lambda rank: RecordedGroups.read(folder, rank, readers, rank), ranks))


def episode_of(group_id: int, index: int, version: int) -> PausedGroup:
    """Return what is recorded of an episode that ended before its group."""
    sample = Sample(group_id, index, (group_id,), (5, version), (-1.0, -1.0), (version,) * 2, False, state="completed")
    return PausedGroup(Prompt(group_id, "", (group_id,)), samples=(replace(sample, generated=(True, True)),))


def taken_by(readers: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[int, list[Sample]]]:
    """Return the samples that each rank takes up, by group."""
    shares = read_by(readers, folder, monkeypatch)
    taken = [share.take(0, AdmissionRule(20, 20, 20), lambda number: (number, 0)) for share in shares]
    loaded = [{n: load(record, Prompt(n, "", (n,))) for n, record in records.items()} for records in taken]
    return [{n: list(parts[0].samples) for n, parts in groups.items() if parts} for groups in loaded]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("readers", [1, 3])
def test_each_group_is_taken_up_whole_by_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readers: int, seed: int
) -> None:
    """Whoever has recorded its episodes, or has finished it."""
    random = Random(seed)
    expected = dict[int, dict[int, int]]()
    journals = [GroupJournal(tmp_path, rank) for rank in range(3)]
    for step in (1, 2, 3):  # each with its own weights
        for _ in range(12):
            group_id = random.randrange(6)
            index = random.randrange(GROUP)
            rank = random.randrange(3)
            episodes = expected.setdefault(group_id, {})
            if len(episodes) < GROUP:
                episodes.setdefault(index, step)  # what a later step has drawn another stays as older weights drew it
                journals[rank].append(step, group_id, episode_of(group_id, index, step), RewardStats(), False)
                if len(episodes) == GROUP:  # as it is scored and recorded, maybe by another engine
                    parts = [episode_of(group_id, one, of).samples[0] for one, of in sorted(episodes.items())]
                    group = SampleGroup(Prompt(group_id, "", (group_id,)), tuple(parts))
                    journals[random.randrange(3)].append(step, group_id, group, RewardStats(), True)
    taken = taken_by(readers, tmp_path, monkeypatch)
    assert sum(map(len, taken)) == len(expected)
    merged = {group_id: samples for groups in taken for group_id, samples in groups.items()}
    assert {g: {s.index: s.weight_versions[0] for s in samples} for g, samples in merged.items()} == expected
    if readers > 1:
        assert sum(map(bool, taken)) > 1  # no rank has them all


@pytest.mark.parametrize("updates", [0, 1, 3])
def test_no_group_is_dropped_as_stale_where_steps_stop_their_updates_early(one_rank_job: Any, updates: int) -> None:
    """Steps may make up to three updates."""
    engine = FakeEngine()
    state = TrainState()
    trained = 0
    collect = collector(one_rank_job, [engine], 12, {}, max_staleness=2)
    collect.settings.optimizer_steps_per_step = 3
    for step in range(1, 8):
        batch = collect.collect(state, step)
        trained += sum(info.response_tokens for info in batch.launched)
        state = replace(batch.state, step=step, optimizer_step=state.optimizer_step + updates)
        engine.version = state.optimizer_step
    carried = [
        parts.outputs if isinstance(parts, PausedGroup) else parts.samples for parts in collect._carried.values()
    ]
    assert trained + sum(len(part.tokens) for parts in carried for part in parts) == engine.generated
