"""Asynchronous runs under random delays: `torchrun -m tests.trainer.async_on_ranks CONFIG OUT --steps 200 --runs 20`

The first rank trains, the second has engines of the test's own, which answer by seed and take random times. The first
writes OUT/runs.json: a hash of every batch, and one of the weights, for each run.
"""

import argparse
import asyncio
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from grpo_mp.batching.step_batch import StepBatch, send_routed_experts
from grpo_mp.batching.updates import StepRule, packing_rule
from grpo_mp.checkpoint.run_state import TrainState
from grpo_mp.config import Settings, load_settings
from grpo_mp.data.prompts import PromptSet
from grpo_mp.distributed.coordinates import data_parallel_size
from grpo_mp.distributed.layout import ModelShape, model_shape
from grpo_mp.distributed.process_groups import Job, Parallel, broadcast, join_job, make_parallel, stop_parallel
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.policy.policy import Policy
from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.rollout import stream as stream_module
from grpo_mp.rollout.client import EngineOutput, SamplingParams, sampling_seed
from grpo_mp.rollout.groups import LaunchedGroups
from grpo_mp.rollout.rollout import rollout_seed
from grpo_mp.rollout.stream import GroupStream
from grpo_mp.rollout.worker import RolloutTask, RolloutWorker
from grpo_mp.trainer.collect import RolloutCollector
from grpo_mp.utils.background import EventLoopThread
from grpo_mp.utils.types import ExpertIds, Prompt, SampleGroup, SampleInfo
from tests.trainer.one_step import OneStep, make_batch

PROMPTS = 60
PROMPT_TOKENS = 2
VOCABULARY = 48
LONGEST = 12
SLOTS = 5
ENGINES = 2


@dataclass
class SeededEngine:
    """Answers after a random time, each token by seed, place and version, which is that of its last update.

    Without a budget of tokens the clock decides the versions: then it answers by prompt and place in the group alone.
    """

    delays: Random
    version: int = 0
    index: int = 0

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        count: int = 1,
        routing: ModelShape | None = None,
        routed_tokens: int = 0,
    ) -> list[EngineOutput]:
        versions = []
        for _ in range(2):  # an update may come between
            versions.append(self.version)
            await asyncio.sleep(self.delays.expovariate(1 / 0.004))
        seeds = sampling.seeds or [f"{tuple(prompt)}/{index}" for index in range(count)]
        return [self._output(prompt, seed, sampling, versions, routing, routed_tokens) for seed in seeds]

    def _output(
        self,
        prompt: Sequence[int],
        seed: int | str,
        sampling: SamplingParams,
        versions: Sequence[int],
        routing: ModelShape | None,
        routed_tokens: int,
    ) -> EngineOutput:
        given = len(prompt) - PROMPT_TOKENS
        whole = length_of(seed)
        places = range(given, min(whole, given + sampling.max_response_tokens))
        of_tokens = (versions[0],) * (len(places) - 1) + (versions[1],)
        drawn = of_tokens if sampling.seeds else (0,) * len(places)
        tokens = tuple(token_of(seed, place, version) for place, version in zip(places, drawn, strict=True))
        logprobs = tuple(map(logprob_of, tokens, drawn))
        truncated = given + len(places) < whole or whole == LONGEST
        experts = experts_of((*prompt, *tokens)[routed_tokens:-1], routing) if routing else None
        return EngineOutput(tokens, logprobs, of_tokens, truncated, routed_experts=experts)


def length_of(seed: int | str) -> int:
    return Random(f"length/{seed}").randint(1, LONGEST)


def token_of(seed: int | str, place: int, version: int) -> int:
    return Random(f"{seed}/{place}/{version}").randrange(4, VOCABULARY)


def logprob_of(token: int, version: int) -> float:
    return -3.0 - token / 64 - version / 1024


def experts_of(tokens: Sequence[int], shape: ModelShape) -> ExpertIds:
    """[tokens, MoE layers, top-k], which tell the token that they belong to."""
    ids = (
        np.array(tokens)[:, None, None] + np.arange(shape.num_moe_layers)[:, None] + np.arange(shape.experts_per_token)
    )
    return (ids % shape.num_experts).astype(np.uint8)


class Scorer:
    def score_group(self, group: SampleGroup, step: int) -> SampleGroup:
        return replace(group, samples=tuple(replace(one, reward=float(sum(one.tokens) % 3)) for one in group.samples))

    def take_stats(self) -> RewardStats:
        return RewardStats()

    def with_own_stats(self) -> "Scorer":
        return self


class Engines:
    """All engines of the job, on its last rank; none on the others."""

    host_ranks = (1,)

    def __init__(self, job: Job, delays: Random, routing: ModelShape | None) -> None:
        self.routing = routing
        self.engines = [SeededEngine(delays) for _ in range(ENGINES)] if job.hosts_engines else []
        self._loop = EventLoopThread("engines")

    def begin(self, task: RolloutTask, stream: GroupStream) -> Future[LaunchedGroups]:
        return self._loop.submit(self._run(task, stream))

    async def _run(self, task: RolloutTask, stream: GroupStream) -> LaunchedGroups:
        tokenizer: Any = SimpleNamespace(get_added_vocab=dict, batch_decode=lambda tokens, **_: [""] * len(tokens))
        scorer: Any = Scorer()
        runs = []
        for index, engine in enumerate(self.engines):
            client: Any = engine
            carried = {number: group for number, group in task.carried.items() if number % ENGINES == index}
            worker = RolloutWorker(client, scorer, tokenizer, 60.0, lambda error: None)
            runs.append(worker.run(replace(task, carried=carried), stream, SLOTS))
        return {number: group for groups in await asyncio.gather(*runs) for number, group in groups.items()}

    def score(self, groups: list[SampleGroup], step: int) -> list[SampleGroup]:
        return groups

    def take_load(self) -> dict[str, float]:
        return {}

    def ask_teachers(self, groups: list[SampleGroup]) -> list[SampleGroup]:
        return groups

    def update(self, version: int) -> None:
        for engine in self.engines:
            engine.version = version

    def close(self) -> None:
        self._loop.close()


def passes(samples: Sequence[SampleInfo]) -> bool:
    """Drop the groups whose rewards are all the same."""
    return len({sample.reward for sample in samples}) > 1


def run(settings: Settings, job: Job, parallel: Parallel | None, steps: int, number: int) -> list[str]:
    """Train for some steps under the delays of this number; return what the first rank trained on, and its weights."""
    # Of its own, or it would take up what the run before has recorded.
    config = settings.run.model_copy(update={"folder": settings.run.folder / str(number)})
    settings = settings.model_copy(update={"run": config})
    delays = Random(f"{number}/{job.rank}")
    routing = model_shape(HfConfig.read(settings.model.path)) if settings.training.router_replay == "R3" else None
    engines: Any = Engines(job, delays, routing)
    phases = SimpleNamespace(phase=lambda *_: nullcontext())
    scorer = Scorer()
    prompts = PromptSet("test", [tuple(Prompt(i, str(i), (4 + i % 40, 4 + i // 40)) for i in range(PROMPTS))])
    stored = replace(job, store=dist.PrefixStore(f"run/{number}", job.store))
    recovery: Any = SimpleNamespace(run=lambda **_: False, begin_step=lambda: None, end_generation=lambda: None)
    collector = RolloutCollector(settings, prompts, engines, scorer, stored, phases, passes, recovery)  # type: ignore[arg-type]
    policy = Policy(settings, parallel, with_reference=False) if parallel else None
    state = TrainState()
    hashes = list[str]()
    for step in range(1, steps + 1):
        rollouts = collector.collect(state, step)
        oldest = min(info.oldest_version for info in rollouts.infos)
        assert step - 1 - oldest <= settings.rollout.max_staleness, (step, oldest)
        if policy and parallel:
            assert all(one.routed_experts is None for group in rollouts.groups for one in group.samples)
            batch = make_batch(settings, parallel, rollouts.groups, step, policy.moe_layers)
            if routing:
                check_experts(batch, routing)
            if settings.rollout.tokens_ahead:
                check_versions(settings, rollouts.groups)
            hashes.append(hash_of([*batch_tensors(batch), *drawn_by(settings, rollouts.groups)]))
            OneStep(settings, policy, batch).train([list(update) for update in batch.updates])
        else:
            assert any(
                one.routed_experts is not None for group in rollouts.of_own_engine for one in group.samples
            ) == bool(routing)
            if settings.training.router_replay == "R3":
                dp_size = data_parallel_size(settings.layout, job.world_size - job.engine_ranks)
                rule = StepRule(
                    packing_rule(settings.layout, settings.training, dp_size, 64), settings.training, settings.run.seed
                )
                send_routed_experts(rollouts.of_own_engine, rollouts.infos, rule, step, job)
        time.sleep(delays.expovariate(1 / 0.004))
        state = broadcast(replace(rollouts.state, step=step), job.group)
        if not settings.updates_running_groups:
            collector.finish_generation()
        engines.update(step)
        collector.synced_step = step
    engines.close()
    return [*hashes, hash_of(policy.tensors.values())] if policy else []


def check_experts(batch: StepBatch, shape: ModelShape) -> None:
    """Every row with a target has the experts of its token, which came from the engine's rank at once."""
    for micro_batch in (one for update in batch.updates for one in update):
        assert micro_batch.routed_experts
        rows = micro_batch.routed_experts.rows
        experts = micro_batch.routed_experts.ids
        assert np.array_equal(experts.numpy(), experts_of(micro_batch.tokens[rows].tolist(), shape))
        assert set(rows.tolist()) >= set(micro_batch.mask.nonzero()[:, 0].tolist())


def check_versions(settings: Settings, groups: Sequence[SampleGroup]) -> None:
    """Every token is the one that the weights draw whose version it has, and so is its logprob."""
    for group in groups:
        for one in group.samples:
            run_seed = rollout_seed(settings.run.seed, settings.engine, "train") or 0
            seed = sampling_seed(run_seed, group.prompt.index, group.prompt.epoch, one.index)
            drawn = enumerate(one.weight_versions)
            assert one.tokens == tuple(token_of(seed, place, version) for place, version in drawn)
            assert one.rollout_logprobs == tuple(map(logprob_of, one.tokens, one.weight_versions))


def drawn_by(settings: Settings, groups: Sequence[SampleGroup]) -> list[torch.Tensor]:
    """The versions of all tokens, where not the clock decides them."""
    samples = [one for group in groups for one in group.samples] if settings.rollout.tokens_ahead else []
    return [torch.tensor(one.weight_versions) for one in samples]


def batch_tensors(batch: StepBatch) -> Iterator[torch.Tensor]:
    for update in batch.updates:
        for micro_batch in update:
            yield from (value for value in vars(micro_batch).values() if isinstance(value, torch.Tensor))


def hash_of(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--staleness", type=int, required=True)
    parser.add_argument("--tokens-ahead", type=int, help="what a step draws of a later one's responses; default: any")
    parser.add_argument("--replay", choices=("none", "R3"), default="none")
    given = parser.parse_args()
    stream_module.POLL_S = 0.002
    overrides = [
        *("schedule=async", "engine.ranks=1", f"rollout.max_staleness={given.staleness}", "layout={}"),
        *("algorithm={filter: {zero_std: refill}}", "data.shuffle=true", "training.updates_per_step=1"),
        *(f"run.steps={given.steps}", f"training.router_replay={given.replay}", "sync.pause=in_place"),
        f"run.folder={given.out / 'run'}",
    ]
    if given.tokens_ahead:
        overrides += [f"rollout.tokens_ahead={given.tokens_ahead}", "engine.deterministic=true"]
    settings = load_settings(given.config, overrides)
    job = join_job(120.0, engine_ranks=1)
    parallel = make_parallel(job, settings.layout, 0) if job.trains else None
    runs = [run(settings, job, parallel, given.steps, number) for number in range(given.runs)]
    if job.rank == 0:
        (given.out / "runs.json").write_text(json.dumps(runs))
    stop_parallel()


if __name__ == "__main__":
    main()
