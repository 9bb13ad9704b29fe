"""A step on one rank without its engine: the samples are made up, all else is the trainer's own."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_mp.algorithms.losses import load_policy_loss
from grpo_mp.batching.exchange import all_gather_sample_info
from grpo_mp.batching.step_batch import StepBatch, UpdateBatches, assemble_step_batch
from grpo_mp.config import Settings
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.trained_model import UpdateReport
from grpo_mp.trainer.logprobs import compute_logprobs
from grpo_mp.trainer.update import train_step
from grpo_mp.utils.types import SampleGroup
from tests.assembly import assembly_of


@dataclass(frozen=True)
class OneStep:
    """A policy on one rank, the settings of its updates, and what it trains on."""

    settings: Settings
    policy: Policy
    batch: StepBatch

    def compute_logprobs(self) -> UpdateBatches:
        return compute_logprobs(self.policy, self.batch, self.settings.algorithm, self.settings.training, {})

    def train(self, updates: UpdateBatches) -> list[UpdateReport]:
        algorithm = self.settings.algorithm
        epochs = self.settings.training.epochs
        reports, _ = train_step(self.policy, updates, algorithm, epochs, {}, load_policy_loss(algorithm))
        return reports


def make_batch(
    settings: Settings,
    parallel: Parallel,
    groups: Sequence[SampleGroup],
    step: int = 1,
    moe_layers: Sequence[int] = (),
) -> StepBatch:
    """Assemble the batch of a step of the tiny model."""
    infos = all_gather_sample_info(groups, parallel.cpu_group)
    return assemble_step_batch(list(groups), infos, step, assembly_of(settings, parallel, 64, moe_layers))
