"""Run a list of cases. Neighbors of one layout share its groups; a case that breaks leaves nothing behind."""

import json
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_mp.distributed.process_groups import Parallel, start_parallel, stop_parallel
from tests.parallel import lora
from tests.parallel.cases import CASES, Case
from tests.parallel.critic_measures import CRITIC_MEASURES
from tests.parallel.distill_measures import DISTILL_MEASURES
from tests.parallel.export_measures import EXPORT_MEASURES
from tests.parallel.half_measures import HALF_MEASURES
from tests.parallel.inputs import settings_of
from tests.parallel.measures import MEASURES, Bench

ALL_MEASURES = MEASURES | EXPORT_MEASURES | CRITIC_MEASURES | DISTILL_MEASURES | HALF_MEASURES | lora.MEASURES
TIMEOUT_S = 120.0  # of one collective: the longest that a rank waits for one that broke


def run_cases(job: Path) -> None:
    """Measure the cases that a JSON file names and write what came of each beside it, errors included."""
    torch.set_num_threads(1)
    runner = CaseRunner(job.parent)
    for name in json.loads(job.read_text()):
        runner.run(CASES[name])
    runner.leave()


class CaseRunner:
    """This rank between cases. `root` holds models, given, checkpoints and results."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store, self.rank, self.ranks = next(dist.rendezvous("env://"))
        self.store.set_timeout(timedelta(seconds=3 * TIMEOUT_S))
        self.parallel: Parallel | None = None
        self.layout = ""

    def run(self, case: Case) -> None:
        """Measure one case on all ranks."""
        results: dict[str, Any] = {}
        try:
            self._measure(case, results)
        except Exception:  # noqa: BLE001  the test of this case shows it, and the other cases continue
            results["error"] = f"rank {self.rank}: {traceback.format_exc()}"
            self.leave()  # at once: ranks that wait for this one wait no more
        if not self._all_succeeded(case, "error" not in results):
            self.leave()
        folder = self.root / "results" / case.name
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(results, folder / f"{self.rank}.pt")

    def leave(self) -> None:
        """End all groups."""
        self.parallel = None
        if dist.is_initialized():
            stop_parallel()

    def _measure(self, case: Case, results: dict[str, Any]) -> None:
        settings = settings_of(case, self.root / "models" / case.model)
        given = torch.load(self.root / "given" / f"{case.model}.pt", weights_only=False)
        if self.layout != case.layout:
            self.leave()
        if not self.parallel:
            self.parallel = start_parallel(settings.layout, seed=0, timeout_s=TIMEOUT_S, name=case.name)
            self.layout = case.layout
        bench = Bench(case, settings, self.parallel, given, self.root / "checkpoints")
        for measure in case.measures:
            results[measure] = ALL_MEASURES[measure](bench)

    def _all_succeeded(self, case: Case, succeeded: bool) -> bool:
        self.store.set(f"{case.name}/{self.rank}", str(succeeded))
        return all(self.store.get(f"{case.name}/{rank}") == b"True" for rank in range(self.ranks))
