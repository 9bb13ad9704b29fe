"""Dump what each step trains on, and train from such a folder without engines: `train --replay RUN/rollouts_dump`."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import xxhash
from pydantic import ConfigDict, TypeAdapter, ValidationError

from grpo_mp.batching.exchange import all_gather_sample_info
from grpo_mp.checkpoint.run_state import TrainState
from grpo_mp.config import Settings
from grpo_mp.distributed.process_groups import Job
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.rollout.dump import read_facts, read_groups, write_groups
from grpo_mp.trainer.collect import RolloutBatch
from grpo_mp.trainer.phase_manager import PhaseManager
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.phases import Phase
from grpo_mp.utils.types import SampleInfo

FOLDER = "rollouts_dump"


@dataclass(frozen=True)
class RolloutShape:
    """What a run and its dump have in common."""

    prompts_per_step: int
    group_size: int
    model_type: str
    vocab_size: int
    num_hidden_layers: int

    @classmethod
    def of(cls, settings: Settings, hf: HfConfig) -> "RolloutShape":
        rollout, (vocabulary, layers) = settings.rollout, map(hf.int, ("vocab_size", "num_hidden_layers"))
        return cls(rollout.prompts_per_step, rollout.group_size, hf.model_type, vocabulary, layers)


@dataclass(frozen=True)
class StepFacts:
    """What a file says beside its samples: the numbers of the step, as the rank knew them."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="constants")

    step: int
    files: int  # of the step: ranks of the job that wrote it
    shape: RolloutShape
    infos: str  # digest of the samples that the step trains on
    routed: bool  # they have the experts that the engine chose; in a file: the rank's share of them has
    state: TrainState
    dropped: Counter[str]
    reward_stats: RewardStats
    carried: int
    length_bias: float
    distilled: bool = False  # they have a teacher's logprobs
    topk: int | None = None  # of how many of the teacher's tokens they have logprobs in each place; None: not known

    @property
    def identity(self) -> tuple[object, ...]:
        return self.step, self.files, self.shape, self.infos


FACTS = TypeAdapter(StepFacts)


def replay_settings(settings: Settings) -> Settings:
    """Return the settings of a run as one without engines, in which all ranks train."""
    engine = settings.engine.model_copy(update={"ranks": 0})
    return settings.model_copy(update={"schedule": "colocated", "engine": engine})


def step_file(folder: Path, step: int, rank: int) -> Path:
    """Return the file that a rank writes of a step."""
    return folder / f"step_{step:06d}" / f"rank_{rank}.parquet"


def dump_step(folder: Path, step: int, batch: RolloutBatch, shape: RolloutShape, rank: int, ranks: int) -> None:
    """Write what this rank has of a step's samples, those that none trains on, too; every one of `ranks` must."""
    groups = [*batch.groups, *batch.unselected]
    chosen = {part.key for info in batch.infos for part in info.sequences if part.has_routed_experts}
    sequences = [part for group in batch.groups for sample in group.samples for part in sample.sequences]
    lacking = [part.key for part in sequences if part.routed_experts is None and part.key in chosen]
    facts = StepFacts(
        step,
        ranks,
        shape=shape,
        infos=_digest(batch.infos),
        routed=bool(chosen) and not lacking,
        state=batch.state,
        dropped=batch.dropped,
        reward_stats=batch.reward_stats,
        carried=batch.carried,
        length_bias=batch.length_bias,
        distilled=all(part.teacher_logprobs for part in sequences),
        topk=min((part.teacher_topk.k if part.teacher_topk else 0 for part in sequences), default=None),
    )
    selected = {info.group_id for info in batch.infos}
    write_groups(step_file(folder, step, rank), groups, selected, FACTS.dump_json(facts).decode())


@dataclass(frozen=True)
class ReplayedRollouts:
    """A folder that holds all steps of a run, as far as can be seen without reading the samples."""

    folder: Path
    facts: dict[int, StepFacts]  # by step
    read: Callable[[int], StepFacts]  # of a step before them

    def of_step(self, step: int) -> StepFacts:
        """Return what the files of a step say.

        A run repeats such a step where its newest checkpoint turns out to be damaged.
        """
        if step not in self.facts:
            self.facts[step] = self.read(step)
        return self.facts[step]

    def files(self, step: int) -> list[Path]:
        return [step_file(self.folder, step, rank) for rank in range(self.of_step(step).files)]


def open_replay(folder: Path, settings: Settings, hf: HfConfig, first: int) -> ReplayedRollouts:
    """Check that a folder has a run's steps from `first` on."""
    read = partial(_read_fitting_facts, folder, settings, hf)
    return ReplayedRollouts(folder, {step: read(step) for step in range(first, settings.run.steps + 1)}, read)


def _read_fitting_facts(folder: Path, settings: Settings, hf: HfConfig, step: int) -> StepFacts:
    """Read what all files of a step say."""
    if not step_file(folder, step, 0).is_file():
        raise UserError(
            f"{folder} has no step {step} of the run's {settings.run.steps}: give RUN/{FOLDER} of a run with "
            f"rollout.dump=true, or set run.steps={step - 1}"
        )
    facts = _read_step_facts(folder, step)
    for name, value in vars(RolloutShape.of(settings, hf)).items():
        if (written := vars(facts.shape)[name]) != value:
            raise UserError(f"{folder}: written with {name} {written}, and this run has {value}: set what it had")
    if settings.training.router_replay == "R3" and not facts.routed:
        raise UserError(f"{folder}: step {step} has no routed experts to replay: set training.router_replay=none")
    if settings.algorithm.distillation and not facts.distilled:
        raise UserError(
            f"{folder}: step {step} has no logprobs of a teacher: leave out algorithm.distillation, or take the "
            "dump of a run that had it"
        )
    topk = settings.algorithm.distillation.topk if settings.algorithm.distillation else None
    if topk and topk > (facts.topk or 0):
        raise UserError(
            f"{folder}: step {step} has logprobs of {facts.topk or 0} of the teacher's most likely tokens: set "
            f"algorithm.distillation.topk={facts.topk or 'null'}"
        )
    return facts


def _read_step_facts(folder: Path, step: int) -> StepFacts:
    """Read what all files of a step say."""
    first = _parse_facts(step_file(folder, step, 0))
    routed, distilled, topk = first.routed, first.distilled, first.topk
    for rank in range(first.files):
        file = step_file(folder, step, rank)
        if not file.is_file():
            raise UserError(f"{file}: no such file, and its step has {first.files} of them: copy it, too")
        of_rank = _parse_facts(file)
        if first.step != step or of_rank.identity != first.identity:
            raise UserError(f"{file}: not of the same step of the same run as rank_0.parquet: copy the folder again")
        routed = routed and of_rank.routed
        distilled = distilled and of_rank.distilled  # a rank without samples says nothing
        topk = min((k for k in (topk, of_rank.topk) if k is not None), default=None)
    return replace(first, routed=routed, distilled=distilled, topk=topk)


def _parse_facts(file: Path) -> StepFacts:
    try:
        return FACTS.validate_json(read_facts(file))
    except ValidationError as error:
        raise UserError(f"{file}: damaged, or written by another version of this program: copy it again") from error


@dataclass
class ReplayCollector:
    """Reads the groups of each step, which a run has dumped, in place of `RolloutCollector`."""

    rollouts: ReplayedRollouts
    job: Job
    phases: PhaseManager
    synced_step: int = 0

    def collect(self, state: TrainState, step: int) -> RolloutBatch:
        """Read this rank's share of the step's files."""
        job, facts = self.job, self.rollouts.of_step(step)
        with self.phases.phase(Phase.SCORE, "replay"):
            files = self.rollouts.files(step)[job.rank :: job.world_size]
            read = [group for file in files for group in read_groups(file)]
            launched = all_gather_sample_info([group for group, _ in read], job.group)
            own = [group for group, selected in read if selected]
            infos = tuple(all_gather_sample_info(own, job.group))
        if _digest(infos) != facts.infos:
            folder = self.rollouts.files(step)[0].parent
            raise UserError(f"{folder}: lengths or rewards are not those that were written: copy it again")
        written = facts.state
        return RolloutBatch(
            groups=own,
            infos=infos,
            launched=tuple(launched),
            dropped=facts.dropped,
            reward_stats=facts.reward_stats,
            carried=facts.carried,
            length_bias=facts.length_bias,
            state=replace(
                state,
                cursor=written.cursor,
                groups_launched=written.groups_launched,
                skipped_until=written.skipped_until,
                solve_rates=written.solve_rates,
            ),
        )

    def finish_generation(self) -> None:
        """Return at once: nothing is generated."""

    def stop(self) -> None:
        """Return at once: nothing was begun."""


def _digest(infos: Sequence[SampleInfo]) -> str:
    sequences = (sequence for info in infos for sequence in info.sequences)
    rows = [(*part.key, part.prompt_tokens, part.response_tokens, part.reward) for part in sequences]
    return xxhash.xxh3_128_hexdigest(json.dumps(rows).encode())
