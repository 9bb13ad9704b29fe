"""The groups of a step: prompts from the cursor, generated and scored until enough of them teach something."""

from collections import Counter
from dataclasses import dataclass, replace

from grpo_mp.batching.exchange import all_gather_sample_info
from grpo_mp.batching.group_filters import (
    GroupSelection,
    PromptCurriculum,
    groups_to_launch,
    length_bias,
    select_groups,
)
from grpo_mp.checkpoint.run_state import TrainState
from grpo_mp.data.cursor import take
from grpo_mp.errors import UserError
from grpo_mp.phases import Phase
from grpo_mp.trainer.context import TrainContext
from grpo_mp.types import Prompt, SampleGroup, SampleInfo


@dataclass(frozen=True)
class RolloutBatch:
    """What a step trains on. `launched` holds all samples that were generated for it, admitted or not."""

    groups: list[SampleGroup]  # admitted, of this rank's engine
    infos: tuple[SampleInfo, ...]  # admitted, of all engines
    launched: tuple[SampleInfo, ...]
    dropped: Counter[str]
    rounds: int
    length_bias: float  # mean length admitted over mean length launched
    state: TrainState  # cursor and counters behind this step's prompts

    @property
    def scored(self) -> tuple[SampleInfo, ...]:
        """Those that were not broken off."""
        return tuple(info for info in self.launched if info.finished)


def collect(session: TrainContext, step: int) -> RolloutBatch:
    """Generate the step's groups. Every rank must call this; the small numbers are the same on all.

    Raises UserError where `filter.no_difference: refill` finds too few groups within `filter.most_tries` rounds.
    """
    wanted, rule = session.settings.rollout.prompts_per_step, session.settings.algorithm.filter
    state, held, infos = session.state, list[SampleGroup](), list[SampleInfo]()
    admission, rounds, launched = GroupSelection((), 0, 0, 0), 0, 0
    while admission.missing(wanted) > 0:
        if rounds == rule.most_tries:
            raise UserError(_cannot_fill(session, step, admission, launched))
        missing = admission.missing(wanted)
        prompts, state = _next_prompts(session, state, groups_to_launch(missing, launched, admission, rule), step)
        with session.scheduler.phase(Phase.GENERATE):
            groups = session.rollout.generate(
                prompts,
                state.groups_launched,
                step,
                session.parallel.store,
                name=f"step/{step}/{rounds}",
                target_groups=missing if rule.admit == "finish" else None,
            )
        state = replace(state, groups_launched=state.groups_launched + len(prompts))
        with session.scheduler.phase(Phase.SCORE):
            infos += all_gather_sample_info(groups, session.parallel.cpu_group)
        held, rounds = held + groups, rounds + 1
        admission, launched = select_groups(infos, wanted, rule), len({info.group_id for info in infos})
        if rule.no_difference != "refill":
            break
    admitted = set(admission.admitted)
    return RolloutBatch(
        groups=[group for group in held if group.samples[0].group_id in admitted],
        infos=tuple(info for info in infos if info.group_id in admitted),
        launched=tuple(infos),
        dropped=Counter(
            no_difference=admission.no_difference, surplus=admission.surplus, unfinished=admission.unfinished
        ),
        length_bias=length_bias(infos, admitted),
        rounds=rounds,
        state=_graduated(state, [info for info in infos if info.finished], step, session),
    )


def _next_prompts(session: TrainContext, state: TrainState, count: int, step: int) -> tuple[list[Prompt], TrainState]:
    """The next prompts that do not rest; where nearly all rest, those that do."""
    prompts, shuffle = session.inputs.train, session.settings.data.shuffle
    graduation, cursor = _graduation(state), session.cursor_of(state)
    taken: list[int] = []
    for _ in range(max(1, len(prompts) // count)):
        indices, cursor = take(cursor, len(prompts), count - len(taken), shuffle)
        taken += [index for index in indices if not graduation.rests(prompts[index].index, step)]
        if len(taken) == count:
            break
    rest, cursor = take(cursor, len(prompts), count - len(taken), shuffle)
    return [prompts[index] for index in (*taken, *rest)], replace(state, cursor=cursor.to_dict())


def _graduation(state: TrainState) -> PromptCurriculum:
    """JSON knows only text as keys."""
    return PromptCurriculum(
        *({int(key): value for key, value in side.items()} for side in (state.solve_streak, state.resting))
    )


def _graduated(state: TrainState, infos: list[SampleInfo], step: int, session: TrainContext) -> TrainState:
    after = _graduation(state).after(infos, step, session.settings.algorithm.filter)
    solve_streak, resting = (
        {str(prompt): value for prompt, value in by_prompt.items()} for by_prompt in (after.solve_streak, after.resting)
    )
    return replace(state, solve_streak=solve_streak, resting=resting)


def _cannot_fill(session: TrainContext, step: int, admission: GroupSelection, launched: int) -> str:
    settings = session.settings
    differ = "rewards that differ" if settings.algorithm.filter.metric == "reward" else "right and wrong answers"
    return (
        f"step {step}: of {launched} groups in {settings.algorithm.filter.most_tries} rounds only "
        f"{len(admission.admitted)} have {differ}, {settings.rollout.prompts_per_step} are needed: take "
        "data that is neither too easy nor too hard, raise algorithm.filter.most_tries or rollout.group_size, or set "
        "algorithm.filter.no_difference=keep"
    )
