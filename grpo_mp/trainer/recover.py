"""Start engines again that were lost, and give them the weights."""

from dataclasses import dataclass

import torch.distributed as dist

from grpo_mp.distributed.process_groups import Job, all_gather
from grpo_mp.phases import Phase
from grpo_mp.rollout.rollout import Rollout
from grpo_mp.scheduler.phase_manager import PhaseManager
from grpo_mp.weight_sync.engine_check import EngineCheck
from grpo_mp.weight_sync.update import WeightSync


@dataclass
class EngineRecovery:
    """Brings lost engines back where all ranks can wait for them. `weight_sync` None: engines read their weights."""

    rollout: Rollout
    job: Job
    phases: PhaseManager
    weight_sync: WeightSync | None = None
    engine_check: EngineCheck | None = None
    version: int = 0  # of the weights that the engines had

    def run(self) -> bool:
        """Bring back the engines that were lost; return whether there were any. Every rank must call this.

        Raises UserError where an engine was lost too often.
        """
        found = False
        while any(all_gather(self.rollout.is_lost, self.job.group)):
            found = True
            with self.phases.phase(Phase.GENERATE, "a lost engine starts again"):
                self.rollout.restart()
                dist.barrier(group=self.job.group)
            if self.weight_sync:
                with self.phases.phase(Phase.SYNC):
                    self.weight_sync.update_weights(self.version, all_weights=True)
            if self.engine_check:
                self.engine_check.run(self.version)
        return found
