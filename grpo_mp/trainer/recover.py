"""Restart lost engines and send them the policy's weights."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch.distributed as dist

from grpo_mp.distributed.process_groups import Job, all_gather
from grpo_mp.policy.reference import Reference
from grpo_mp.rollout.rollout import Rollout
from grpo_mp.trainer.engine_check import EngineCheck
from grpo_mp.trainer.phase_manager import PhaseManager
from grpo_mp.utils.phases import Phase
from grpo_mp.weight_sync.compare import CheckReport
from grpo_mp.weight_sync.update import SyncReport, WeightSync


@dataclass
class EngineRecovery:
    """Restarts lost engines at points that all ranks reach. `weight_sync`: None if engines load weights from a folder.

    `former`: copy of the policy's weights from before its last update, which engines use during the update.
    """

    rollout: Rollout
    job: Job
    phases: PhaseManager
    weight_sync: WeightSync | None = None
    engine_check: EngineCheck | None = None
    version: int = 0  # weight version of the last sync
    former: Reference | None = None

    def begin_step(self) -> None:
        """Restart lost engines before a step, if they share the trainer's devices."""
        if not self.rollout.owns_devices:
            self.run()

    def end_generation(self) -> None:
        """Wait for engines lost during generation to restart, before the trainer uses the devices."""
        if not self.rollout.owns_devices:
            self.rollout.join(wait=True)
            dist.barrier(group=self.job.group)

    def update_weights(self, version: int) -> list[SyncReport]:
        """Send the policy's weights to every engine, also to restarted ones; return the reports of all ranks."""
        assert self.weight_sync
        self.rollout.join(wait=False)
        self.version = version
        return all_gather(self.weight_sync.update_weights(version), self.job.group)

    def check_engines(self) -> CheckReport:
        """Compare the engines with the policy, after lost engines have restarted if all were lost."""
        assert self.engine_check
        report = self.engine_check.run(self.version)
        if not report.tokens and self.run():
            report = self.engine_check.run(self.version)
        return report

    def keep_weights(self) -> None:
        """Copy the policy's weights to `former` before an update."""
        if self.former:
            self.former.update()

    def run(self, former: bool = False) -> bool:
        """Wait for lost engines to restart and send them the weights; return whether any engine was lost.

        `former`: send the weights from before the policy's last update.
        """
        found = False
        while any(all_gather(self.rollout.is_lost, self.job.group)):
            found = True
            with self.phases.phase(Phase.GENERATE, "a lost engine starts again"):
                self.rollout.join(wait=True)
                dist.barrier(group=self.job.group)
            with self.former.swapped() if former and self.former else nullcontext():
                if self.weight_sync:
                    with self.phases.phase(Phase.SYNC):
                        self.update_weights(self.version)
                if self.engine_check:
                    self.engine_check.run(self.version)
        return found
