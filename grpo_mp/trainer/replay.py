"""Dump the rollouts of each step, and train on a dump without engines: `train --replay RUN/rollouts_dump`."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from grpo_mp.batching.exchange import all_gather_sample_info
from grpo_mp.checkpoint.run_state import TrainState
from grpo_mp.distributed.process_groups import Job
from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.rollout.dump import read_facts, read_groups, write_groups
from grpo_mp.trainer.collect import RolloutBatch
from grpo_mp.trainer.phase_manager import PhaseManager
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.phases import Phase

FOLDER = "rollouts_dump"


@dataclass(frozen=True)
class StepFacts:
    """Metadata of a dump file. `files`: number of the step's files, one per rank of the job that wrote them."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="constants")

    step: int
    files: int
    state: TrainState
    dropped: Counter[str]
    reward_stats: RewardStats
    carried: int
    length_bias: float


FACTS = TypeAdapter(StepFacts)


def step_file(folder: Path, step: int, rank: int) -> Path:
    """Return the path of a rank's dump file of a step."""
    return folder / f"step_{step:06d}" / f"rank_{rank}.parquet"


def dump_step(folder: Path, step: int, batch: RolloutBatch, rank: int, ranks: int) -> None:
    """Write this rank's groups of a step to its dump file, including groups that are not trained on."""
    facts = StepFacts(
        step,
        ranks,
        state=batch.state,
        dropped=batch.dropped,
        reward_stats=batch.reward_stats,
        carried=batch.carried,
        length_bias=batch.length_bias,
    )
    selected = {info.group_id for info in batch.infos}
    groups = [*batch.groups, *batch.unselected]
    write_groups(step_file(folder, step, rank), groups, selected, FACTS.dump_json(facts).decode())


@dataclass(frozen=True)
class ReplayedRollouts:
    """Dumped rollouts of a run's steps. `steps`: last step of the run that replays them."""

    folder: Path
    steps: int

    def check_steps(self, first: int) -> None:
        """Check that the dump has the steps from `first` on."""
        for step in range(first, self.steps + 1):
            for file in self.files(step):
                _parse_facts(file)

    def read_facts(self, step: int) -> StepFacts:
        """Read the facts of a step."""
        file = step_file(self.folder, step, 0)
        if not file.is_file():
            raise UserError(
                f"{self.folder} has no step {step} of the run's {self.steps}: give RUN/{FOLDER} of a run with "
                f"rollout.dump=true, or set run.steps={step - 1}"
            )
        return _parse_facts(file)

    def files(self, step: int) -> list[Path]:
        return [step_file(self.folder, step, rank) for rank in range(self.read_facts(step).files)]


def _parse_facts(file: Path) -> StepFacts:
    try:
        return FACTS.validate_json(read_facts(file))
    except ValidationError as error:
        raise UserError(f"{file}: damaged, or written by another version of this program: copy it again") from error


@dataclass
class ReplayCollector:
    """Reads the groups of each step from a dump, in place of a RolloutCollector."""

    rollouts: ReplayedRollouts
    job: Job
    phases: PhaseManager
    synced_step: int = 0

    def collect(self, state: TrainState, step: int) -> RolloutBatch:
        """Return the groups in this rank's share of the step's files."""
        job = self.job
        facts = self.rollouts.read_facts(step)
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
