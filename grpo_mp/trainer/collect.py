"""Collect the groups of a step: launch prompts, generate and score until the step has its groups."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from grpo_mp.algorithms.group_filters import GroupFilter
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.batching.exchange import all_gather_sample_info, sample_infos
from grpo_mp.batching.group_selection import Admission, PromptCurriculum, admission_rule, length_bias
from grpo_mp.checkpoint.run_state import TrainState
from grpo_mp.config.sections import RolloutConfig
from grpo_mp.data.cursor import Cursor
from grpo_mp.data.prompt_queue import PromptQueue
from grpo_mp.data.prompts import PromptSet
from grpo_mp.distributed.layout import ModelShape
from grpo_mp.distributed.peers import watching_peers
from grpo_mp.distributed.process_groups import Parallel, all_gather
from grpo_mp.errors import UserError
from grpo_mp.phases import Phase
from grpo_mp.rollout.rollout import Rollout, rollout_sampling
from grpo_mp.rollout.stream import GroupStream
from grpo_mp.rollout.worker import LaunchedGroups, RolloutTask, as_unfinished
from grpo_mp.scheduler.phase_manager import PhaseManager
from grpo_mp.types import SampleGroup, SampleInfo


@dataclass(frozen=True)
class RolloutBatch:
    """What a step trains on. `launched` holds all samples that were generated for it, selected or not."""

    groups: list[SampleGroup]  # selected, of this rank's engine
    infos: tuple[SampleInfo, ...]  # selected, of all engines
    launched: tuple[SampleInfo, ...]
    dropped: Counter[str]
    carried: int  # groups that were begun for later steps, of all engines
    length_bias: float  # mean length selected over mean length launched
    state: TrainState  # cursor and counters behind this step's prompts

    @property
    def scored(self) -> tuple[SampleInfo, ...]:
        """Return the launched samples that were not broken off."""
        return tuple(info for info in self.launched if info.finished)


@dataclass
class RolloutCollector:
    """Generates the groups of each step from the train prompts.

    What is begun for later steps stays on its rank, and is lost when the job ends: a resumed run begins anew. Where an
    epoch ends meanwhile, it may take the prompts of that time in another order.
    """

    rollout_config: RolloutConfig
    algorithm: AlgorithmConfig
    shuffle: bool
    seed: int
    prompts: PromptSet
    rollout: Rollout
    parallel: Parallel
    phases: PhaseManager
    group_filter: GroupFilter
    routing: ModelShape | None = None  # the model's, where samples keep the experts that the engine chose
    _queue: PromptQueue = field(init=False)
    _carried: LaunchedGroups = field(default_factory=dict, init=False)  # by number in the next step's launch order

    def __post_init__(self) -> None:
        self._queue = PromptQueue(len(self.prompts), self.shuffle)

    def collect(self, state: TrainState, step: int) -> RolloutBatch:
        """Generate and score the step's groups. Every rank must call this; the sample infos are the same on all.

        Raises UserError where `filter.zero_std: refill` has launched all groups that it may and too few are kept.
        """
        config, group = self.rollout_config, self.parallel.cpu_group
        curriculum = PromptCurriculum(state.solved_streak, state.skipped_until)
        rule = admission_rule(self.algorithm.filter, config.prompts_per_step, config.max_staleness)
        self._queue.begin_step(
            state.cursor or Cursor(seed=self.seed),
            lambda index: curriculum.is_skipped(self.prompts[index].index, step),
            rule.launched if rule.lookahead else None,
        )
        task = RolloutTask(
            lambda number: self.prompts[self._queue[number]],
            config.group_size,
            state.groups_launched,
            step,
            rollout_sampling(config),
            self._keeps,
            self._carried,
            frozenset().union(*all_gather(set(self._carried), group)) if rule.lookahead else frozenset(),
            self.routing,
        )
        with self.phases.phase(Phase.GENERATE), watching_peers(group) as check_peers:
            stream = GroupStream(self.parallel.store, f"step/{step}", rule, check_peers)
            launched = self.rollout.run(task, stream)
        with self.phases.phase(Phase.SCORE):
            self._queue.extend(max(all_gather(len(self._queue), group)))  # the same prompts are drawn on all ranks
            admission, kept = stream.admission(), dict(stream.verdicts())
            if self.algorithm.filter.zero_std == "refill" and len(admission.selected) < rule.needed:
                raise UserError(self._too_few_groups(step, admission, rule.max_launched))
            return self._make_batch(state, step, launched, admission, kept)

    def _keeps(self, group: SampleGroup) -> bool:
        return self.algorithm.filter.zero_std == "keep" or self.group_filter(sample_infos(group))

    def _make_batch(
        self, state: TrainState, step: int, launched: LaunchedGroups, admission: Admission, kept: Mapping[int, bool]
    ) -> RolloutBatch:
        """Take what the step trains on out of this rank's launched groups, and carry what later steps train on."""
        first, group = state.groups_launched, self.parallel.cpu_group
        later: LaunchedGroups = {}
        if self.rollout_config.max_staleness:
            later = {number: groups for number, groups in launched.items() if number >= admission.consumed}
        own = [as_unfinished(launched[number], first + number) for number in launched.keys() - later.keys()]
        infos = all_gather_sample_info(own, group)
        counts = all_gather((len(later), max(launched, default=-1) + 1), group)
        # By finish, some of what may be launched need not have been.
        cursor = self._queue.use_up(min(admission.consumed, len(self._queue)))
        if not self.rollout_config.max_staleness:
            self._queue.give_back()
        self._carried = {number - admission.consumed: groups for number, groups in later.items()}
        selected = {first + number for number in admission.selected}
        curriculum = PromptCurriculum(state.solved_streak, state.skipped_until).updated(
            [info for info in infos if info.finished], step, self.algorithm.curriculum
        )
        next_group = admission.consumed if self.rollout_config.max_staleness else max(last for _, last in counts)
        return RolloutBatch(
            groups=[group for group in own if group.samples and group.samples[0].group_id in selected],
            infos=tuple(info for info in infos if info.group_id in selected),
            launched=tuple(infos),
            dropped=_count_dropped(infos, selected, {first + number for number, is_kept in kept.items() if is_kept}),
            carried=sum(carried for carried, _ in counts),
            length_bias=length_bias(infos, selected),
            state=replace(state, cursor=cursor, groups_launched=first + next_group, **vars(curriculum)),
        )

    def _too_few_groups(self, step: int, admission: Admission, launched: int) -> str:
        rule = self.algorithm.filter
        return (
            f"step {step}: of {launched} groups only {len(admission.selected)} pass "
            f"algorithm.filter.metric={rule.metric}, {self.rollout_config.prompts_per_step} are needed: take data that "
            "is neither too easy nor too hard, raise algorithm.filter.max_launch_factor or rollout.group_size, or set "
            "algorithm.filter.zero_std=keep"
        )


def _count_dropped(infos: Sequence[SampleInfo], selected: Set[int], kept: Set[int]) -> Counter[str]:
    """Count the groups that the step does not train on: dropped by the filter, not needed, broken off."""
    finished = {info.group_id for info in infos if info.finished}
    unfinished = {info.group_id for info in infos} - finished
    return Counter(zero_std=len(finished - kept), surplus=len(finished & kept - selected), unfinished=len(unfinished))
