"""Collect the groups of a step: launch prompts, generate and score until the step has its groups."""

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist

from grpo_mp.algorithms.group_filters import GroupFilter
from grpo_mp.algorithms.settings import FilterConfig
from grpo_mp.batching.exchange import all_gather_sample_info, sample_infos, send_groups
from grpo_mp.batching.group_selection import Admission, PromptCurriculum, admission_rule, length_bias
from grpo_mp.checkpoint.run_state import TrainState
from grpo_mp.config import Settings
from grpo_mp.data.cursor import Cursor
from grpo_mp.data.prompt_queue import PromptQueue
from grpo_mp.data.prompts import PromptSet
from grpo_mp.distributed.peers import watching_peers
from grpo_mp.distributed.process_groups import Job, all_gather
from grpo_mp.errors import UserError
from grpo_mp.phases import Phase
from grpo_mp.rewards.scorer import RewardStats, Scorer, sum_stats
from grpo_mp.rollout.rollout import Rollout, rollout_sampling
from grpo_mp.rollout.saved_groups import load_groups, save_groups
from grpo_mp.rollout.stream import GroupStream
from grpo_mp.rollout.worker import LaunchedGroups, RolloutTask, RunningGroup, as_unfinished
from grpo_mp.scheduler.phase_manager import PhaseManager
from grpo_mp.trainer.recover import EngineRecovery
from grpo_mp.types import SampleGroup, SampleInfo


@dataclass(frozen=True)
class RolloutBatch:
    """What a step trains on. `launched` holds all samples that were generated for it, selected or not."""

    groups: list[SampleGroup]  # selected, of this rank's engine
    infos: tuple[SampleInfo, ...]  # selected, of all engines
    launched: tuple[SampleInfo, ...]
    dropped: Counter[str]
    reward_stats: RewardStats  # of all engines
    carried: int  # groups that were begun for later steps, of all engines
    length_bias: float  # mean length selected over mean length launched
    state: TrainState  # cursor and counters behind this step's prompts

    @property
    def scored(self) -> tuple[SampleInfo, ...]:
        """Return the launched samples that were not broken off."""
        return tuple(info for info in self.launched if info.finished)


@dataclass
class Generation:
    """The groups of a step on their way."""

    task: RolloutTask
    stream: GroupStream
    launched: Future[LaunchedGroups]
    watch: ExitStack  # that of the other engines' ranks

    def wait(self) -> LaunchedGroups:
        """Return this rank's groups once the step has its own. Raises UserError from an engine or a reward."""
        with self.watch:
            return self.launched.result()


@dataclass(frozen=True)
class Collected:
    """What this rank launched for a step, by number in its launch order; the next one begins with `consumed`."""

    step: int
    launched: LaunchedGroups
    consumed: int


@dataclass
class RolloutCollector:
    """Generates the groups of each step from the train prompts.

    Where engines have ranks of their own, those begin a step's groups as soon as the step before has its own. What is
    begun for later steps stays on its rank; where a job is stopped, the one that resumes the run goes on with it.
    """

    settings: Settings
    prompts: PromptSet
    rollout: Rollout
    scorer: Scorer
    job: Job
    phases: PhaseManager
    group_filter: GroupFilter
    recovery: EngineRecovery
    synced_step: int = 0  # the engines have the weights after this step
    _queue: PromptQueue = field(init=False)
    _carried: LaunchedGroups = field(default_factory=dict, init=False)  # by number in the next step's launch order
    _next: Generation | None = field(default=None, init=False)
    _collected: Collected | None = field(default=None, init=False)
    _stopped: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._queue = PromptQueue(len(self.prompts), self.settings.data.shuffle)

    def collect(self, state: TrainState, step: int) -> RolloutBatch:
        """Generate and score the step's groups. Every rank must call this; the sample infos are the same on all.

        Raises UserError where `filter.zero_std: refill` has launched all groups that it may and too few are kept.
        """
        group, ahead = self.job.group, not self.settings.shares_devices
        generation, launched = self._generate(state, step)
        with self.phases.phase(Phase.SCORE):
            self._queue.extend(max(all_gather(len(self._queue), group)))  # the same prompts are drawn on all ranks
            admission, kept = generation.stream.admission(), dict(generation.stream.verdicts())
            if self._rule.zero_std == "refill" and len(admission.selected) < generation.stream.rule.needed:
                raise UserError(self._too_few_groups(step, admission, generation.stream.rule.max_launched))
            if (aborted := _count_aborted(admission, kept)) > generation.stream.rule.max_aborted:
                limit_s = self.settings.rollout.group_timeout_s
                raise UserError(
                    f"step {step}: {aborted} groups took longer than rollout.group_timeout_s={limit_s:g} s: raise it"
                )
            batch = self._make_batch(state, step, launched, admission, kept)
            self._collected = Collected(step, launched, admission.consumed)
            if ahead:
                self._next = self._begin(batch.state, step + 1) if step < self.settings.run.steps else None
                batch = replace(batch, groups=send_groups(batch.groups, self._trainer_of, group))
        return batch

    def _generate(self, state: TrainState, step: int) -> tuple[Generation, LaunchedGroups]:
        """Return what this rank launched when the step has its groups; engines that are lost come back meanwhile."""
        self.recovery.begin_step()
        generation = self._next
        while True:
            with self.phases.phase(Phase.GENERATE):
                generation = generation or self._begin(state, step)
                launched = generation.wait()
                # Ranks that only train wait here.
                done = any(all_gather(generation.stream.admission().done, self.job.group))
                if done:
                    self.recovery.end_generation()
            if done:
                return generation, launched
            self.recovery.run()  # no engine was left
            generation = self._launch(generation.stream.try_again(), replace(generation.task, carried=launched))

    def finish_generation(self) -> None:
        """Wait until no group runs any more that was begun with the present weights. Every rank must call this."""
        if self._next:
            self._next.wait()
        dist.barrier(group=self.job.group)  # the seconds of the weight sync are not those of this wait

    def stop(self, state: TrainState) -> None:
        """End what was begun behind `state`, and keep it for a job that resumes there. Every rank must call this."""
        self._stopped = True
        begun = self._next.wait() if self._next else self._carried
        if (last := self._collected) and last.step > state.step:  # the resumed job repeats the step
            begun = {**last.launched, **{last.consumed + number: group for number, group in begun.items()}}
        if self.job.rank == 0:
            shutil.rmtree(self._folder(state.step).parent, ignore_errors=True)
        dist.barrier(group=self.job.group)
        file = self._folder(state.step) / f"rank_{self.job.rank}.safetensors"
        save_groups(file, self.rollout.pause(begun), self.settings.rollout.group_size)

    def _folder(self, step: int) -> Path:
        """Return where groups are kept that a job began behind this step."""
        return self.settings.run.folder / "rollouts" / f"step_{step:06d}"

    def _take_saved(self, step: int) -> LaunchedGroups:
        """Return this engine's share of what the job before began behind a step."""
        hosts, rank = self.rollout.host_ranks, self.job.rank
        if rank not in hosts:
            return {}
        saved = load_groups(sorted(self._folder(step).glob("*.safetensors")), self.prompts)
        own = {number: group for number, group in saved.items() if number % len(hosts) == hosts.index(rank)}
        return {number: group for number, group in own.items() if self._queue[number] == group.prompt.index}

    def _begin(self, state: TrainState, step: int) -> Generation:
        """Begin to generate a step's groups, on the ranks that host engines. Every rank must call this."""
        config, job, colocated = self.settings.rollout, self.job, self.settings.shares_devices
        curriculum = PromptCurriculum(state.solved_streak, state.skipped_until)
        rule = admission_rule(self._rule, config.prompts_per_step, config.max_staleness)
        self._queue.begin_step(
            state.cursor or Cursor(seed=self.settings.run.seed),
            lambda index: curriculum.is_skipped(self.prompts[index].index, step),
            rule.launched if rule.lookahead else None,
        )
        if rule.lookahead:  # which prompts are skipped follows from the step, not from when one is launched
            self._queue.extend(rule.max_launched + rule.max_aborted + rule.lookahead)

        if self._collected is None:
            self._carried = self._take_saved(state.step)

        def lookahead() -> int:
            synced = step - 1 if colocated else self.synced_step
            steps = min(config.max_staleness + synced - (step - 1), self.settings.run.steps - step)
            return config.prompts_per_step * max(0, steps)

        task = RolloutTask(
            lambda number: self.prompts[self._queue[number]],
            config.group_size,
            state.groups_launched,
            step,
            rollout_sampling(config),
            self._keeps,
            self._carried,
            frozenset().union(*all_gather(set(self._carried), job.group)),
            lookahead,
            pauses=colocated,
            stopped=lambda: self._stopped,
            routing=self.rollout.routing,
        )
        return self._launch(GroupStream(job.store, f"step/{step}", rule, len(self.rollout.host_ranks)), task)

    def _launch(self, stream: GroupStream, task: RolloutTask) -> Generation:
        with ExitStack() as stack:
            # Engines with ranks of their own are watched by the ranks that train, which wait for them in collectives.
            if self.settings.shares_devices:
                stream.check_peers = stack.enter_context(watching_peers(self.job.group))
            return Generation(task, stream, self.rollout.begin(task, stream), stack.pop_all())

    def _trainer_of(self, group: SampleGroup) -> int:
        """Return the rank that takes a group over from its engine."""
        return group.samples[0].group_id % (self.job.world_size - self.job.engine_ranks)

    @property
    def _rule(self) -> FilterConfig:
        return self.settings.algorithm.filter

    def _keeps(self, group: SampleGroup) -> bool:
        return self._rule.zero_std == "keep" or self.group_filter(sample_infos(group))

    def _make_batch(
        self,
        state: TrainState,
        step: int,
        launched: LaunchedGroups,
        admission: Admission,
        kept: Mapping[int, bool | None],
    ) -> RolloutBatch:
        """Take what the step trains on out of this rank's launched groups, and carry what later steps train on."""
        first, group, max_staleness = state.groups_launched, self.job.group, self.settings.rollout.max_staleness
        later: LaunchedGroups = {}
        if max_staleness:
            later = {number: groups for number, groups in launched.items() if number >= admission.consumed}
        own = [
            as_unfinished(group, first + number)
            for number, group in sorted(launched.items())
            if number not in later and not isinstance(group, RunningGroup)
        ]
        infos = all_gather_sample_info(own, group)
        counts = all_gather((len(later), max(launched, default=-1) + 1), group)
        # By finish, some of what may be launched need not have been.
        cursor = self._queue.use_up(min(admission.consumed, len(self._queue)))
        if not max_staleness:
            self._queue.give_back()
        self._carried = {number - admission.consumed: groups for number, groups in later.items()}
        selected = {first + number for number in admission.selected}
        curriculum = PromptCurriculum(state.solved_streak, state.skipped_until).updated(
            [info for info in infos if info.finished], step, self.settings.algorithm.curriculum
        )
        next_group = admission.consumed if max_staleness else max(last for _, last in counts)
        return RolloutBatch(
            groups=[group for group in own if group.samples and group.samples[0].group_id in selected],
            infos=tuple(info for info in infos if info.group_id in selected),
            launched=tuple(infos),
            dropped=_count_dropped(
                infos,
                selected,
                {first + number for number, is_kept in kept.items() if is_kept},
                _count_aborted(admission, kept),
            ),
            reward_stats=sum_stats(all_gather(self.scorer.take_stats(), group)),
            carried=sum(carried for carried, _ in counts),
            length_bias=length_bias(infos, selected),
            state=replace(state, cursor=cursor, groups_launched=first + next_group, **vars(curriculum)),
        )

    def _too_few_groups(self, step: int, admission: Admission, launched: int) -> str:
        rule, needed = self._rule, self.settings.rollout.prompts_per_step
        return (
            f"step {step}: of {launched} groups only {len(admission.selected)} pass "
            f"algorithm.filter.metric={rule.metric}, {needed} are needed: take data that "
            "is neither too easy nor too hard, raise algorithm.filter.max_launch_factor or rollout.group_size, or set "
            "algorithm.filter.zero_std=keep"
        )


def _count_aborted(admission: Admission, kept: Mapping[int, bool | None]) -> int:
    """Count the groups before the next step's first that took too long."""
    return sum(kept.get(number, False) is None for number in range(admission.consumed))


def _count_dropped(infos: Sequence[SampleInfo], selected: Set[int], kept: Set[int], aborted: int) -> Counter[str]:
    """Count the groups that the step does not train on: dropped by the filter, not needed, broken off, aborted."""
    finished = {info.group_id for info in infos if info.finished}
    unfinished = {info.group_id for info in infos} - finished
    surplus = len(finished & kept - selected)
    return Counter(zero_std=len(finished - kept), surplus=surplus, unfinished=len(unfinished), aborted=aborted)
