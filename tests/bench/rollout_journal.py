"""Seconds of recording groups beside a step: `python -m tests.bench.rollout_journal [--repeat 5]`.

Groups as `configs/moe_671b.yaml` generates them, with mean lengths, of random tokens, logprobs and, as with
`training.router_replay=R3`, routed experts; one rank, which hosts the only engine, records all in threads beside
its requests. The ratio is the processor time of these threads to the step that the planner expects: no step waits for
them. Reach: under 1 %, where the file system of temporary files takes writes past the page cache.
"""

import argparse
import tempfile
import time
from pathlib import Path
from random import Random

import numpy as np

from grpo_mp.config import load_settings
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.job import PlannedJob, make_job
from grpo_mp.planner.model_configs import find_config
from grpo_mp.planner.plan import make_plan
from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.rollout.journal import GroupJournal, journal_file
from grpo_mp.utils.types import Prompt, Sample, SampleGroup

RECIPE, CLUSTER, NODES = Path(__file__).parents[2] / "configs/moe_671b.yaml", "h100-80", 16


def make_group(job: PlannedJob, routed: bool) -> SampleGroup:
    """Make a group of random samples."""
    rng, rollout, model = Random(0), job.settings.rollout, job.model
    response, total = int(job.mean_response_tokens), int(job.mean_seq_len)
    prompt = Prompt(0, "", tuple(rng.randrange(model.vocab_size) for _ in range(total - response)))
    shape = (total - 1, model.num_moe_layers, model.experts_per_token)
    experts = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8) if routed else None

    def sample(index: int) -> Sample:
        tokens = tuple(rng.randrange(model.vocab_size) for _ in range(response))
        logprobs = tuple(-rng.random() for _ in range(response))
        return Sample(0, index, prompt.tokens, tokens, logprobs, (0,) * response, False, routed_experts=experts)

    return SampleGroup(prompt, tuple(map(sample, range(rollout.group_size))))


def main() -> None:
    """Print a row without and with routed experts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    settings = load_settings(RECIPE)
    job = make_job(settings, find_config(settings.model.path)[0], read_cluster(CLUSTER), NODES)
    step_s, groups = make_plan(job).step_s, settings.rollout.prompts_per_step
    for routed in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            journal, group = GroupJournal(Path(folder), 0), make_group(job, routed)
            journal.append(0, 0, group, RewardStats(), kept=True)  # opens, imports
            start = time.thread_time()
            for number in range(repeat):
                journal.append(1, number, group, RewardStats(), kept=True)
            seconds = (time.thread_time() - start) / repeat
            size = journal_file(Path(folder), 1, 0).stat().st_size / repeat
        print(
            f"{'with' if routed else 'without'} routed experts: a group {seconds:.3f} s, {size / 1e6:.1f} MB; "
            f"{groups} of a step {groups * seconds:.1f} s beside {step_s:.0f} s, ratio {groups * seconds / step_s:.4f}"
        )


if __name__ == "__main__":
    main()
