"""Collect the groups of a step: take prompts, generate and score until enough groups are selected."""

from collections import Counter
from dataclasses import dataclass, replace

from grpo_mp.algorithms.group_filters import GroupFilter
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.batching.exchange import all_gather_sample_info
from grpo_mp.batching.group_selection import (
    GroupSelection,
    PromptCurriculum,
    groups_to_launch,
    length_bias,
    select_groups,
)
from grpo_mp.checkpoint.run_state import TrainState
from grpo_mp.config.sections import RolloutConfig
from grpo_mp.data.cursor import Cursor, take
from grpo_mp.data.prompts import PromptSet
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.errors import UserError
from grpo_mp.phases import Phase
from grpo_mp.rollout.rollout import Rollout, rollout_sampling
from grpo_mp.rollout.worker import RolloutTask
from grpo_mp.scheduler.phase_manager import PhaseManager
from grpo_mp.types import Prompt, SampleGroup, SampleInfo


@dataclass(frozen=True)
class RolloutBatch:
    """What a step trains on. `launched` holds all samples that were generated for it, selected or not."""

    groups: list[SampleGroup]  # selected, of this rank's engine
    infos: tuple[SampleInfo, ...]  # selected, of all engines
    launched: tuple[SampleInfo, ...]
    dropped: Counter[str]
    rounds: int
    length_bias: float  # mean length selected over mean length launched
    state: TrainState  # cursor and counters behind this step's prompts

    @property
    def scored(self) -> tuple[SampleInfo, ...]:
        """Return the launched samples that were not broken off."""
        return tuple(info for info in self.launched if info.finish_order)


@dataclass(frozen=True)
class RolloutCollector:
    """Generates the groups of each step from the train prompts."""

    rollout_config: RolloutConfig
    algorithm: AlgorithmConfig
    shuffle: bool
    seed: int
    prompts: PromptSet
    rollout: Rollout
    parallel: Parallel
    phases: PhaseManager
    group_filter: GroupFilter

    def collect(self, state: TrainState, step: int) -> RolloutBatch:
        """Generate and score the step's groups. Every rank must call this; the sample infos are the same on all.

        Raises UserError where `filter.zero_std: refill` finds too few groups within `filter.max_rounds` rounds.
        """
        rollout, rule = self.rollout_config, self.algorithm.filter
        prompts_per_step = rollout.prompts_per_step
        groups, infos = list[SampleGroup](), list[SampleInfo]()
        selection, rounds, launched = GroupSelection((), 0, 0, 0), 0, 0
        while (missing := prompts_per_step - len(selection.selected)) > 0:
            if rounds == rule.max_rounds:
                raise UserError(self._too_few_groups(step, selection, launched))
            prompts, state = self._next_prompts(state, groups_to_launch(missing, launched, selection, rule), step)
            target_groups = missing if rule.select_by == "finish" else None
            task = RolloutTask(
                prompts, rollout.group_size, state.groups_launched, step, rollout_sampling(rollout), target_groups
            )
            with self.phases.phase(Phase.GENERATE):
                new_groups = self.rollout.run(task, f"step/{step}/{rounds}", self.parallel.store)
            state = replace(state, groups_launched=state.groups_launched + len(prompts))
            with self.phases.phase(Phase.SCORE):
                infos += all_gather_sample_info(new_groups, self.parallel.cpu_group)
            groups, rounds = groups + new_groups, rounds + 1
            selection = select_groups(infos, prompts_per_step, rule, self.group_filter)
            launched = len({info.group_id for info in infos})
            if rule.zero_std != "refill":
                break
        selected = set(selection.selected)
        curriculum = PromptCurriculum(state.solved_streak, state.skipped_until).updated(
            [info for info in infos if info.finish_order], step, self.algorithm.curriculum
        )
        return RolloutBatch(
            groups=[group for group in groups if group.samples[0].group_id in selected],
            infos=tuple(info for info in infos if info.group_id in selected),
            launched=tuple(infos),
            dropped=Counter(zero_std=selection.zero_std, surplus=selection.surplus, unfinished=selection.unfinished),
            length_bias=length_bias(infos, selected),
            rounds=rounds,
            state=replace(state, **vars(curriculum)),
        )

    def _next_prompts(self, state: TrainState, count: int, step: int) -> tuple[list[Prompt], TrainState]:
        """Take the next prompts that are not skipped, where nearly all are also those that are; and the state after."""
        prompts, curriculum = self.prompts, PromptCurriculum(state.solved_streak, state.skipped_until)
        cursor = state.cursor or Cursor(seed=self.seed)
        taken: list[int] = []
        for _ in range(max(1, len(prompts) // count)):
            indices, cursor = take(cursor, len(prompts), count - len(taken), self.shuffle)
            taken += [index for index in indices if not curriculum.is_skipped(prompts[index].index, step)]
            if len(taken) == count:
                break
        remaining, cursor = take(cursor, len(prompts), count - len(taken), self.shuffle)
        return [prompts[index] for index in (*taken, *remaining)], replace(state, cursor=cursor)

    def _too_few_groups(self, step: int, selection: GroupSelection, launched: int) -> str:
        rule = self.algorithm.filter
        return (
            f"step {step}: of {launched} groups in {rule.max_rounds} rounds only "
            f"{len(selection.selected)} pass algorithm.filter.metric={rule.metric}, "
            f"{self.rollout_config.prompts_per_step} are needed: take data that is neither too easy nor too hard, "
            "raise algorithm.filter.max_rounds or rollout.group_size, or set algorithm.filter.zero_std=keep"
        )
