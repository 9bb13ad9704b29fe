"""Dump the rollouts of each step, and train on a dump without engines: `train --replay RUN/rollouts_dump`."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from grpo_mp.algorithms.distillation_settings import DistillationConfig
from grpo_mp.batching.exchange import all_gather_sample_info
from grpo_mp.checkpoint.run_state import TrainState
from grpo_mp.config.sections import RolloutConfig
from grpo_mp.distributed.process_groups import Job
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.rollout.dump import read_facts, read_groups, write_groups
from grpo_mp.trainer.collect import RolloutBatch
from grpo_mp.trainer.phase_manager import PhaseManager
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.phases import Phase

FOLDER = "rollouts_dump"


@dataclass(frozen=True)
class RolloutShape:
    """Sizes in which a run must agree with the dump that it replays."""

    prompts_per_step: int
    group_size: int
    model_type: str
    vocab_size: int
    num_hidden_layers: int

    @classmethod
    def of(cls, rollout: RolloutConfig, hf: HfConfig) -> "RolloutShape":
        vocabulary, layers = map(hf.int, ("vocab_size", "num_hidden_layers"))
        return cls(rollout.prompts_per_step, rollout.group_size, hf.model_type, vocabulary, layers)


@dataclass(frozen=True)
class StepFacts:
    """Metadata of a dump file: numbers of the step, and the optional fields that all samples of the file have."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="constants")

    step: int
    files: int  # number of the step's files: one per rank of the job that wrote them
    shape: RolloutShape
    state: TrainState
    dropped: Counter[str]
    reward_stats: RewardStats
    carried: int
    length_bias: float
    routed: bool  # all samples have routed experts
    distilled: bool  # all samples have a teacher's logprobs
    topk: int | None  # teacher's most likely tokens per position; None: the file has no samples


FACTS = TypeAdapter(StepFacts)


def step_file(folder: Path, step: int, rank: int) -> Path:
    """Return the path of a rank's dump file of a step."""
    return folder / f"step_{step:06d}" / f"rank_{rank}.parquet"


def dump_step(folder: Path, step: int, batch: RolloutBatch, shape: RolloutShape, rank: int, ranks: int) -> None:
    """Write this rank's groups of a step to its dump file, including groups that are not trained on."""
    groups = [*batch.groups, *batch.unselected]
    chosen = {part.key for info in batch.infos for part in info.sequences if part.has_routed_experts}
    sequences = [part for group in batch.groups for sample in group.samples for part in sample.sequences]
    lacking = [part.key for part in sequences if part.routed_experts is None and part.key in chosen]
    facts = StepFacts(
        step,
        ranks,
        shape=shape,
        state=batch.state,
        dropped=batch.dropped,
        reward_stats=batch.reward_stats,
        carried=batch.carried,
        length_bias=batch.length_bias,
        routed=bool(chosen) and not lacking,
        distilled=all(part.teacher_logprobs for part in sequences),
        topk=min((part.teacher_topk.k if part.teacher_topk else 0 for part in sequences), default=None),
    )
    selected = {info.group_id for info in batch.infos}
    write_groups(step_file(folder, step, rank), groups, selected, FACTS.dump_json(facts).decode())


@dataclass(frozen=True)
class ReplayedRollouts:
    """A dump folder, and what the run expects of it.

    `steps`: last step of the run; `routed`: samples have routed experts; `distillation`: of the run.
    """

    folder: Path
    shape: RolloutShape
    steps: int
    routed: bool = False
    distillation: DistillationConfig | None = None

    def check_steps(self, first: int) -> None:
        """Check that the dump has the steps from `first` on."""
        for step in range(first, self.steps + 1):
            self.read_facts(step)

    def files(self, step: int) -> list[Path]:
        first = step_file(self.folder, step, 0)
        if not first.is_file():
            raise UserError(
                f"{self.folder} has no step {step} of the run's {self.steps}: give RUN/{FOLDER} of a run with "
                f"rollout.dump=true, or set run.steps={step - 1}"
            )
        return [step_file(self.folder, step, rank) for rank in range(_parse_facts(first).files)]

    def read_facts(self, step: int) -> StepFacts:
        """Read the facts in all files of a step, and check that they fit the run."""
        by_file = {file: _parse_facts(file) for file in self.files(step)}
        first = next(iter(by_file.values()))
        for file, facts in by_file.items():
            if (facts.step, facts.shape) != (step, first.shape):
                raise UserError(
                    f"{file}: not of the same step of the same run as rank_0.parquet: copy the folder again"
                )
        for name, value in vars(self.shape).items():
            if (written := vars(first.shape)[name]) != value:
                raise UserError(
                    f"{self.folder}: written with {name} {written}, and this run has {value}: set what it had"
                )
        if self.routed and not all(facts.routed for facts in by_file.values()):
            raise UserError(
                f"{self.folder}: step {step} has no routed experts to replay: set training.router_replay=none"
            )
        if self.distillation:
            topk = min((facts.topk for facts in by_file.values() if facts.topk is not None), default=0)
            if not all(facts.distilled for facts in by_file.values()) or (self.distillation.topk or 0) > topk:
                raise UserError(
                    f"{self.folder}: step {step} lacks logprobs of a teacher that algorithm.distillation needs: give "
                    "the dump of a run with the same algorithm.distillation"
                )
        return first


def _parse_facts(file: Path) -> StepFacts:
    try:
        return FACTS.validate_json(read_facts(file))
    except ValidationError as error:
        raise UserError(f"{file}: damaged, or written by another version of this program: copy it again") from error


@dataclass
class ReplayCollector:
    """Collector that reads the groups of each step from a dump; see `Collector`."""

    rollouts: ReplayedRollouts
    job: Job
    phases: PhaseManager
    synced_step: int = 0

    def collect(self, state: TrainState, step: int) -> RolloutBatch:
        """Return the groups in this rank's share of the step's files."""
        job, facts = self.job, self.rollouts.read_facts(step)
        with self.phases.phase(Phase.SCORE, "replay"):
            files = self.rollouts.files(step)[job.rank :: job.world_size]
            read = [group for file in files for group in read_groups(file)]
            launched = all_gather_sample_info([group for group, _ in read], job.group)
            own = [group for group, selected in read if selected]
            infos = tuple(all_gather_sample_info(own, job.group))
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
