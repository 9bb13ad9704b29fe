"""Collect the groups of a step: launch prompts, generate and score until the step has its groups."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import torch.distributed as dist

from grpo_mp.algorithms.selection import Curriculum, GroupFilter
from grpo_mp.algorithms.settings import FilterConfig
from grpo_mp.batching.exchange import all_gather_sample_info, sample_infos, send_groups
from grpo_mp.batching.group_selection import (
    Admission,
    AdmissionRule,
    PromptCurriculum,
    admission_rule,
    length_bias,
    token_limit,
)
from grpo_mp.batching.routed_experts import without_experts
from grpo_mp.checkpoint.run_state import FALLBACKS, ROLLOUTS, TrainState, checkpoint_step, complete_checkpoints
from grpo_mp.config import Settings
from grpo_mp.data.cursor import Cursor, PromptQueue
from grpo_mp.data.prompts import PromptSet
from grpo_mp.distributed.peers import watching_peers
from grpo_mp.distributed.process_groups import Job, all_gather
from grpo_mp.rewards.scorer import RewardStats, Scorer, sum_stats
from grpo_mp.rollout.groups import EndedGroup, LaunchedGroups, PausedGroup, RunningGroup, as_unfinished, oldest_version
from grpo_mp.rollout.journal import GroupJournal, find_paused, load, prune
from grpo_mp.rollout.rollout import Rollout, rollout_sampling, rollout_seed
from grpo_mp.rollout.stream import GroupStream
from grpo_mp.rollout.worker import RolloutTask
from grpo_mp.trainer.phase_manager import PhaseManager
from grpo_mp.trainer.recorded import RecordedGroups, read_recorded
from grpo_mp.trainer.recover import EngineRecovery
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.phases import Phase
from grpo_mp.utils.types import Prompt, SampleGroup, SampleInfo


@dataclass(frozen=True)
class RolloutBatch:
    """Groups that a step trains on, and statistics of all groups launched for the step."""

    groups: list[SampleGroup]  # selected groups of this rank's engine, or those sent here for training
    infos: tuple[SampleInfo, ...]  # selected samples of all engines
    launched: tuple[SampleInfo, ...]  # all samples launched for the step, of all engines
    dropped: Counter[str]  # groups that are not trained on, by reason
    reward_stats: RewardStats  # over all engines
    carried: int  # groups already begun for later steps, over all engines
    length_bias: float  # mean response length of selected samples / of launched samples
    state: TrainState  # cursor and counters after this step's prompts
    unselected: Sequence[SampleGroup] = ()  # groups of this rank's engine that are not trained on
    # With engines on separate ranks: selected groups of this rank's engine, with routed experts. None: see `groups`.
    generated: list[SampleGroup] | None = None
    times: Mapping[str, float] = field(default_factory=dict)  # balance between engines, see generation_times

    @property
    def of_own_engine(self) -> list[SampleGroup]:
        return self.groups if self.generated is None else self.generated

    @property
    def scored(self) -> tuple[SampleInfo, ...]:
        return tuple(info for info in self.launched if info.finished)


@dataclass
class Generation:
    """Generation of a step in progress on this rank."""

    task: RolloutTask
    stream: GroupStream
    launched: Future[LaunchedGroups]
    watch: ExitStack  # watches the ranks of the other engines
    began_s: float  # time.monotonic() at the start

    def wait(self) -> LaunchedGroups:
        with self.watch:
            return self.launched.result()


@dataclass
class RolloutCollector:
    """Generates the groups of each step from the train prompts.

    Engines on separate ranks prefetch groups of later steps and keep generating while the trainer works. Engines that
    share devices with the trainer pause these groups, and the next step continues them. Every ended
    group is recorded for a job that resumes the run.
    """

    settings: Settings
    prompts: PromptSet
    rollout: Rollout
    scorer: Scorer
    job: Job
    phases: PhaseManager
    group_filter: GroupFilter
    recovery: EngineRecovery
    curriculum: Curriculum | None = None  # user-defined curriculum
    recorded: RecordedGroups | None = None  # groups of an earlier job; None: not read yet
    synced_step: int = 0  # the engines hold the weights that this step produced
    _queue: PromptQueue = field(init=False)
    _carried: LaunchedGroups = field(default_factory=dict, init=False)  # by launch number in the next step
    _next: Generation | None = field(default=None, init=False)  # generation of the next step, if begun
    _begun: GroupStream | None = field(default=None, init=False)  # stream of the step begun last
    _journal: GroupJournal = field(init=False)
    _stats: dict[int, RewardStats] = field(default_factory=dict, init=False)  # by id of the scored group
    _ends_s: dict[int, float] = field(default_factory=dict, init=False)  # time.monotonic() at each group's end, by id
    _stale: int = field(default=0, init=False)  # carried groups dropped for exceeding max_staleness
    _stopped: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._queue = PromptQueue(self.prompts.epoch_size, self.settings.data.shuffle, self.prompts.mixture)
        self._journal = GroupJournal(self.settings.run.folder / ROLLOUTS, self.job.rank)

    def collect(self, state: TrainState, step: int) -> RolloutBatch:
        """Generate and score the step's groups; sample infos are equal on all ranks."""
        group = self.job.group
        ahead = not self.settings.shares_devices
        generation, launched = self._generate(state, step)
        with self.phases.phase(Phase.SCORE):
            self._queue.extend(max(all_gather(len(self._queue), group)))  # the same prompts are drawn on all ranks
            admission = generation.stream.admission()
            kept = dict(generation.stream.verdicts())
            if self._rule.zero_std == "refill" and len(admission.selected) < generation.stream.rule.needed:
                raise UserError(self._too_few_groups(step, admission, generation.stream.rule.max_launched))
            aborted = _aborted(admission, kept, state.groups_launched)
            if len(aborted) > generation.stream.rule.max_aborted:
                limit_s = self.settings.rollout.group_timeout_s
                took = f"{len(aborted)} groups took longer than rollout.group_timeout_s={limit_s:g} s"
                raise UserError(f"step {step}: {took}: raise it")
            batch = self._make_batch(state, step, launched=launched, admission=admission, kept=kept)
            batch = replace(batch, times=self._times(batch, generation.began_s))
            if ahead:
                self._next = self._begin(batch.state, step + 1) if step < self.settings.run.steps else None
                sent = send_groups(map(without_experts, batch.groups), self._trainer_of, group)
                batch = replace(batch, groups=sent, generated=batch.groups)
        return batch

    def _generate(self, state: TrainState, step: int) -> tuple[Generation, LaunchedGroups]:
        """Generate until the step has its groups, restarting lost engines; return this rank's launched groups."""
        self.recovery.begin_step()
        generation = self._next
        while True:
            with self.phases.phase(Phase.GENERATE):
                generation = generation or self._begin(state, step)
                launched = generation.wait()
                done = self._is_done(generation)  # ranks that only train wait here
                if done:
                    self.recovery.end_generation()
            if done:
                return generation, launched
            self.recovery.run()  # all engines were lost, or a lost engine has restarted
            generation = self._go_on(generation)

    def finish_generation(self) -> None:
        """Wait until no engine generates with its current weights."""
        # A lost deterministic engine restarts with its old weights (`former`): newer weights would draw other tokens.
        if not self._next:
            return
        self._next.wait()
        while self.settings.engine.deterministic and not self._is_done(self._next):
            self.recovery.run(former=True)
            self._next = self._go_on(self._next)
            self._next.wait()
        dist.barrier(group=self.job.group)  # keeps the wait for slower ranks out of the sync's measured time

    def _is_done(self, generation: Generation) -> bool:
        """Return whether the step has its groups, and later groups have reached their token limit."""
        ahead = generation.task.lookahead() if generation.task.token_limit else 0
        return any(all_gather(generation.stream.is_done(ahead), self.job.group))

    def _go_on(self, generation: Generation) -> Generation:
        """Continue a generation after engines were lost or restarted, with the groups launched so far."""
        task = replace(generation.task, carried=generation.wait())
        return self._launch(generation.stream.try_again(), task, generation.began_s)

    def stop(self) -> None:
        """Pause the groups begun for later steps, and record them for a job that resumes the run."""
        self._stopped = True
        self.rollout.pause(self._next.wait() if self._next else self._carried)
        dist.barrier(group=self.job.group)

    def _take_recorded(self, state: TrainState, step: int, rule: AdmissionRule) -> None:
        """Add groups that an earlier job recorded for this step or later ones to this rank's carried groups."""
        folder = self.settings.run.folder / ROLLOUTS
        job = self.job
        if self.recorded is None:
            self.recorded = read_recorded(folder, self.rollout.host_ranks, job)
        elif job.rank == 0 and (saved := complete_checkpoints(self.settings.run.folder)[-FALLBACKS:]):
            prune(folder, checkpoint_step(saved[0]) - self.settings.rollout.max_staleness)
        queue = self._queue
        recorded = dict[int, EndedGroup]()
        if not self.settings.updates_running_groups:
            rule = replace(rule, lookahead=rule.needed * self.settings.steps_ahead)
        taken = self.recorded.take(state.groups_launched, rule, lambda number: (queue[number], queue.epoch(number)))
        # Skip groups that are begun already: an unrecorded abort lets a step launch more groups than `take` assumed.
        begun = frozenset[int]().union(*all_gather(set(self._carried), job.group))
        for number, record in taken.items():
            if number not in begun and (loaded := load(record, self._prompt(number))):
                recorded[number], self._stats[state.groups_launched + number] = loaded
        carried: LaunchedGroups = {**recorded, **self._carried}
        # A repeated step may launch other groups than before: a recorded group may then reach a later step, too old.
        steps_back = state.step - (step - 1 - self.settings.rollout.max_staleness)
        # Lower bound of the oldest allowed weight version; exact unless a step stopped its updates early.
        version = state.optimizer_step - steps_back * self.settings.optimizer_steps_per_step
        self._carried = {
            number: group
            for number, group in carried.items()
            if isinstance(group, RunningGroup) or oldest_version(group, version) >= version
        }
        self._stale = len(carried) - len(self._carried)

    def _record(self, step: int, group_id: int, group: EndedGroup, stats: RewardStats) -> None:
        """Record an ended group for a resumed job; skip a paused group that no later step may continue."""
        self._stats[group_id] = stats
        self._ends_s[group_id] = time.monotonic()
        goes_on = self.settings.rollout.max_staleness or self._stopped
        if goes_on or not isinstance(group, PausedGroup):
            kept = isinstance(group, SampleGroup) and self._keeps(group)
            self._journal.append(step, group_id, group, stats, kept)

    def _recall(self, step: int, group_id: int, prompt: Prompt) -> PausedGroup | None:
        """Return the recorded part of a lost engine's group, from any rank; None if there is no record."""
        config = self.settings.rollout
        steps = range(max(0, step - config.max_staleness), step + 1)
        has_any = config.max_staleness or config.rollout_function
        return find_paused(self.settings.run.folder / ROLLOUTS, steps, group_id, prompt) if has_any else None

    def _prompt(self, number: int) -> Prompt:
        return replace(self.prompts[self._queue[number]], epoch=self._queue.epoch(number))

    @property
    def _token_limit(self) -> Callable[[int], int] | None:
        config = self.settings.rollout
        ahead = self.settings.steps_ahead
        if config.tokens_ahead is None:
            return None
        return partial(token_limit, needed=config.prompts_per_step, steps_ahead=ahead, tokens_ahead=config.tokens_ahead)

    def _begin(self, state: TrainState, step: int) -> Generation:
        """Start to generate a step's groups on this rank's engine, if it has one."""
        config = self.settings.rollout
        job = self.job
        colocated = self.settings.shares_devices
        curriculum = PromptCurriculum(state.skipped_until, state.solve_rates)
        rule = admission_rule(self._rule, config.prompts_per_step, config.max_staleness)
        self._queue.begin_step(
            state.cursor or Cursor(seed=self.settings.run.seed),
            lambda index: curriculum.is_skipped(index, step),
            rule.launched if rule.lookahead else None,
        )
        if rule.lookahead:  # draw prompts now, so that skipping depends on the step and not on the launch time
            self._queue.extend(rule.max_launched + rule.max_aborted + rule.lookahead)

        self._take_recorded(state, step, rule)

        def lookahead() -> int:
            ahead = self.settings.steps_ahead
            if self.settings.updates_running_groups:
                ahead = config.max_staleness + self.synced_step - (step - 1)
            return config.prompts_per_step * max(0, min(ahead, self.settings.run.steps - step))

        task = RolloutTask(
            self._prompt,
            config.group_size,
            first_group_id=state.groups_launched,
            step=step,
            sampling=rollout_sampling(config),
            keeps=self._keeps,
            carried=self._carried,
            carried_by_all=frozenset().union(*all_gather(set(self._carried), job.group)),
            lookahead=lookahead,
            token_limit=self._token_limit,
            pauses=colocated,
            stopped=lambda: self._stopped,
            routing=self.rollout.routing,
            seed=rollout_seed(self.settings.run.seed, self.settings.engine, "train"),
            record=partial(self._record, step),
            record_part=lambda group_id, group: self._journal.append(step, group_id, group, RewardStats(), False),
            recall=partial(self._recall, step),
            after_loss=self._begun is not None and self._begun.has_lost(),
        )
        self._begun = GroupStream(job.store, f"step/{step}", rule, len(self.rollout.host_ranks))
        return self._launch(self._begun, task, time.monotonic())

    def _launch(self, stream: GroupStream, task: RolloutTask, began_s: float) -> Generation:
        with ExitStack() as stack:
            # Engines on separate ranks need no watch: training ranks wait for them in collectives, which then fail.
            if self.settings.shares_devices:
                stream.check_peers = stack.enter_context(watching_peers(self.job.group))
            return Generation(
                task, stream, launched=self.rollout.begin(task, stream), watch=stack.pop_all(), began_s=began_s
            )

    def _trainer_of(self, group: SampleGroup) -> int:
        """Return the training rank that receives a group, if engines are on separate ranks."""
        return group.samples[0].group_id % (self.job.world_size - self.job.engine_ranks)

    @property
    def _rule(self) -> FilterConfig:
        return self.settings.algorithm.filter

    def _keeps(self, group: SampleGroup) -> bool:
        """Return whether a group passes the group filter."""
        if self._rule.zero_std == "keep":
            return True
        scored = [info for info in sample_infos(group) if info.is_scored]
        return bool(scored) and self.group_filter(scored)

    def _make_batch(
        self,
        state: TrainState,
        step: int,
        launched: LaunchedGroups,
        admission: Admission,
        kept: Mapping[int, bool | None],
    ) -> RolloutBatch:
        """Make the step's batch from this rank's launched groups, and carry the groups of later steps."""
        first = state.groups_launched
        group = self.job.group
        max_staleness = self.settings.rollout.max_staleness
        later: LaunchedGroups = {}
        if max_staleness:
            later = {number: groups for number, groups in launched.items() if number >= admission.consumed}
        # Groups begun after the last needed group depend on the engines' speed: deterministic runs do not count them.
        counted = admission.consumed if self.settings.engine.deterministic else max(launched, default=-1) + 1
        own = [
            as_unfinished(group, first + number)
            for number, group in sorted(launched.items())
            if number not in later and number < counted and not isinstance(group, RunningGroup)
        ]
        own = list(self.rollout.score(own, step))
        aborted = _aborted(admission, kept, first)
        infos = all_gather_sample_info(own, group)
        counts = all_gather((len(later), counted, self._stale), group)
        cursor = self._queue.use_up(min(admission.consumed, len(self._queue)))
        if not max_staleness:
            self._queue.give_back()
        self._carried = {number - admission.consumed: groups for number, groups in later.items()}
        selected = {first + number for number in admission.selected}
        curriculum = PromptCurriculum(state.skipped_until, state.solve_rates).updated(
            [info for info in infos if info.finished], step, self.settings.algorithm.curriculum, self.curriculum
        )
        next_group = admission.consumed if max_staleness else max(last for _, last, _ in counts)
        if self.settings.engine.deterministic and not max_staleness:
            # Skip the ids of all groups that may have been begun: a later group must not match their records.
            rule = admission_rule(self._rule, self.settings.rollout.prompts_per_step, max_staleness)
            next_group = max(next_group, rule.max_launched + rule.max_aborted)
        with_samples = [group for group in own if group.samples]
        groups = [group for group in with_samples if group.samples[0].group_id in selected]
        return RolloutBatch(
            groups=list(self.rollout.ask_teachers(groups)),
            infos=tuple(info for info in infos if info.group_id in selected),
            launched=tuple(infos),
            dropped=_count_dropped(
                infos,
                selected,
                kept={first + number for number, is_kept in kept.items() if is_kept},
                aborted=aborted,
                stale=sum(stale for *_, stale in counts),
            ),
            reward_stats=sum_stats(all_gather(self._take_stats(range(first, first + counted), later), group)),
            carried=sum(carried for carried, *_ in counts),
            length_bias=length_bias(infos, selected, aborted),
            state=replace(state, cursor=cursor, groups_launched=first + next_group, **vars(curriculum)),
            unselected=[group for group in with_samples if group.samples[0].group_id not in selected],
        )

    def _times(self, batch: RolloutBatch, began_s: float) -> dict[str, float]:
        """Return the generation times and the load of a step over all engines, see generation_times."""
        groups = [group for group in (*batch.groups, *batch.unselected) if group.samples]
        ends_s = [self._ends_s.get(group.samples[0].group_id, began_s) for group in groups]
        for number in list(self._ends_s):  # a copy: engine threads add entries meanwhile
            if number < batch.state.groups_launched:
                del self._ends_s[number]
        tokens = sum(len(sample.tokens) for group in groups for sample in group.samples)
        work = tokens, [max(0.0, end - began_s) for end in ends_s]
        loads = [load for load in all_gather(self.rollout.take_load(), self.job.group) if load]
        means = {name: statistics.fmean(load[name] for load in loads) for name in (loads[0] if loads else ())}
        return generation_times(all_gather(work, self.job.group)) | means

    def _take_stats(self, counted: range, later: Collection[int]) -> RewardStats:
        """Return the reward statistics of the groups with ids in `counted`; keep only those of `later` groups."""
        ended = [group_id for group_id in list(self._stats) if group_id - counted.start not in later]
        stats = {group_id: self._stats.pop(group_id) for group_id in ended}
        return sum_stats(
            [self.scorer.take_stats(), *(stats[group_id] for group_id in sorted(stats) if group_id in counted)]
        )

    def _too_few_groups(self, step: int, admission: Admission, launched: int) -> str:
        rule = self._rule
        needed = self.settings.rollout.prompts_per_step
        return (
            f"step {step}: of {launched} groups only {len(admission.selected)} pass "
            f"algorithm.filter.metric={rule.metric}, {needed} are needed: take data that "
            "is neither too easy nor too hard, raise rollout.group_size, or set "
            "algorithm.filter.zero_std=keep"
        )


def _aborted(admission: Admission, kept: Mapping[int, bool | None], first: int) -> set[int]:
    """Return the ids of groups that were aborted by their time limit. `first`: id of the step's first group."""
    return {first + number for number in range(admission.consumed) if kept.get(number, False) is None}


def _count_dropped(
    infos: Sequence[SampleInfo], selected: Set[int], kept: Set[int], aborted: Set[int], stale: int
) -> Counter[str]:
    finished = {info.group_id for info in infos if info.finished}
    unfinished = {info.group_id for info in infos} - finished - aborted
    surplus = len(finished & kept - selected)
    counts = {"zero_std": len(finished - kept), "surplus": surplus, "unfinished": len(unfinished)}
    return Counter(counts | {"aborted": len(aborted), "stale": stale})


def generation_times(engines: Sequence[tuple[int, Sequence[float]]]) -> dict[str, float]:
    """Return two metrics of a step; empty if no group took time.

    `engines`: tokens of each engine, and when each of its groups ended, in seconds after the generation began.
    speed/slowest_engine_ratio: lowest / median tokens per second of an engine, up to the end of its last group.
    time/generate_tail_share: share of the generation time that is left when 90 % of the groups have ended.
    """
    ends = sorted(end for _, of_engine in engines for end in of_engine)
    if not ends or not ends[-1]:
        return {}
    speeds = [tokens / max(of_engine) for tokens, of_engine in engines if any(of_engine)]
    nine_in_ten = ends[-(-9 * len(ends) // 10) - 1]
    return {
        "speed/slowest_engine_ratio": min(speeds) / statistics.median_high(speeds),
        "time/generate_tail_share": (ends[-1] - nine_in_ten) / ends[-1],
    }
