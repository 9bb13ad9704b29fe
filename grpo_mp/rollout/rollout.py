"""Rollout on one rank: owns the rank's engine and reward servers, and generates, scores and evaluates groups."""

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from grpo_mp import platform
from grpo_mp.checkpoint.hf_reader import has_hf_weights
from grpo_mp.config.data_sections import EvalSetConfig
from grpo_mp.config.sections import EngineConfig, ModelConfig, RolloutConfig
from grpo_mp.data.self_teacher import SelfTeacher
from grpo_mp.distributed.layout import ModelShape
from grpo_mp.distributed.process_groups import Job
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.rewards.scorer import RewardStats, Scorer, sum_stats
from grpo_mp.rewards.teacher import Teachers, is_teacher
from grpo_mp.rollout.client import EngineClient, SamplingParams, sampling_seed
from grpo_mp.rollout.concurrency import LaunchLimit
from grpo_mp.rollout.engine_args import FP32_HEAD, EngineSpec, cuda_defaults, speculative_arguments
from grpo_mp.rollout.engine_layout import EnginePlacement, engine_host_ranks, engine_placements, precision_arguments
from grpo_mp.rollout.episodes import EpisodeParts, EpisodeRunner, with_failures
from grpo_mp.rollout.groups import EndedGroup, LaunchedGroups, RunningGroup, unanswered
from grpo_mp.rollout.hosted_engine import EngineNode, HostedEngine
from grpo_mp.rollout.reward_servers import (
    GROUPS_IN_FLIGHT,
    Connect,
    RewardServers,
    score_groups,
)
from grpo_mp.rollout.routed_experts import ARGUMENT, RETURN_KEYS
from grpo_mp.rollout.server import EngineProcess
from grpo_mp.rollout.stream import GroupStream
from grpo_mp.rollout.worker import RolloutTask, RolloutWorker, give_back, pause_running
from grpo_mp.utils.background import EventLoopThread
from grpo_mp.utils.errors import EngineError
from grpo_mp.utils.section import ServedModelConfig
from grpo_mp.utils.types import Prompt, SampleGroup


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """Model and scorers of a rollout.

    `episodes`: parts of multi-turn rollouts; None: a rollout is a single response. `teachers`: compute their logprobs
    of sampled tokens, for distillation; `self_teacher`: writes the prompts of the policy as a teacher. `served`: see
    `served_models`. `recorded`: see `recorded_shape`. `has_engines`: False: a replay.
    """

    hf: HfConfig
    tokenizer: PreTrainedTokenizerBase
    scorer: Scorer
    episodes: EpisodeParts | None = None
    teachers: Teachers | None = None
    self_teacher: SelfTeacher | None = None
    served: Mapping[str, ServedModelConfig] = field(default_factory=dict)
    recorded: ModelShape | None = None
    has_engines: bool = True


class Rollout:
    """One rank's view of the job's engines; on a rank without an engine most methods do nothing."""

    def __init__(
        self,
        parts: RolloutParts,
        engine: EngineConfig,
        rollout: RolloutConfig,
        base: EngineSpec,
        job: Job,
        logs: Path,
    ) -> None:
        """Assign engines to ranks without starting them. `base`: see `base_spec`; `logs`: folder."""
        self._parts = parts
        self._tokenizer = parts.tokenizer
        self._scorer = parts.scorer
        self._episodes = parts.episodes
        self._teachers = parts.teachers
        self._engine_config = engine
        self._config = rollout
        self._seed = base.seed
        placements = engine_placements(engine, job.world_size, job.ranks_per_node) if parts.has_engines else ()
        self.host_ranks = engine_host_ranks(placements)
        self.routing = parts.recorded
        self.owns_devices = engine.owns_devices
        self._loop = EventLoopThread(f"engine of rank {job.rank}")
        self._pause = asyncio.Event()
        limit_s = rollout.group_timeout_s
        self.reward_servers = (
            RewardServers(parts.served, base, logs, job.ranks_per_node, self.host_ranks, limit_s)
            if parts.served
            else None
        )
        self.engine: HostedEngine | None = None
        self._limit: LaunchLimit | None = None
        self._limited: EngineClient | None = None  # the client of `_limit`; a restarted engine has another
        self._node: EngineNode | None = None  # this node's part of an engine whose host is on another node
        if placement := next((placement for placement in placements if placement.rank == job.rank), None):
            spec = engine_spec(base, placement, parts, engine, rollout=rollout)
            name = f"engine_{placement.engine}" + (f"_node_{placement.node_rank}" if placement.node_rank else "")
            process = EngineProcess(spec, logs / f"{name}.log")
            if placement.is_host:
                # The time limit of a group must expire before that of its request.
                self.engine = HostedEngine(engine, process, self._loop, self.routing, request_timeout_s=1.5 * limit_s)
            else:
                self._node = EngineNode(process)

    @property
    def client(self) -> EngineClient | None:
        """Return the client of this rank's engine; None if the rank has no engine or the engine is lost."""
        return self.engine.client if self.engine else None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks whose GPUs belong to engines."""
        size = self._engine_config.gpus_per_engine
        return tuple(rank for host in self.host_ranks for rank in range(host, host + size))

    def start(self, store: dist.Store) -> None:
        """Start this rank's engine process and reward servers without waiting for them. `store`: the job's store."""
        if part := self.engine or self._node:
            part.start(store)
        if self.reward_servers:
            self.reward_servers.launch()

    def open_reward_servers(self, group: dist.ProcessGroup, sleeps: bool) -> None:
        """Wait until the servers of reward models and teachers answer, and connect to them; see RewardServers.open."""
        if self.reward_servers:
            teachers = self._teachers
            connect: dict[str, Connect] = {
                name: partial(
                    teachers.connect if teachers and is_teacher(name) else self._scorer.connect_model,
                    name,
                )
                for name in self._parts.served
            }
            self.reward_servers.open(connect, group, sleeps)

    def score(self, groups: Sequence[SampleGroup], step: int) -> Sequence[SampleGroup]:
        """Return the groups, complete ones scored by the reward models that the job serves, if any.

        With self-distillation their samples then have the teacher's prompts.
        """
        if self.reward_servers and self._scorer.defers:
            groups = self._score_by_servers(groups, step, self.reward_servers)
        teacher = self._parts.self_teacher
        return [teacher.show(group) for group in groups] if teacher else groups

    def _score_by_servers(
        self, groups: Sequence[SampleGroup], step: int, servers: RewardServers
    ) -> Sequence[SampleGroup]:
        parts = self._episodes

        def finish(group: SampleGroup) -> SampleGroup:
            if not (group.finished and group.samples):
                return group
            scored = self._scorer.finish_group(group, step)
            return with_failures(scored, parts.config.failed) if parts else scored

        return servers.score(groups, finish)

    def ask_teachers(self, groups: Sequence[SampleGroup]) -> Sequence[SampleGroup]:
        """Return the groups with their teachers' logprobs of their tokens; unchanged without teachers."""
        if not self._teachers:
            return groups
        if self.reward_servers and self.reward_servers.serves_teachers:
            return self.reward_servers.score(groups, self._teachers.score_group)
        return score_groups(groups, self._teachers.score_group, GROUPS_IN_FLIGHT)

    @contextmanager
    def losing_engine(self) -> Iterator[EngineClient | None]:
        """Yield this rank's client, if any; if the body raises EngineError, suppress it and mark the engine as lost."""
        try:
            yield self.client
        except EngineError as error:
            self.lose_engine(error)

    def lose_engine(self, error: EngineError) -> None:
        """Mark this rank's engine as lost, see HostedEngine.lose. Raises UserError after `engine.max_restarts`."""
        if self.engine:
            self.engine.lose(error)

    @property
    def is_lost(self) -> bool:
        """Return whether this rank's engine was lost and has not rejoined; re-raise the error of a failed restart."""
        if part := self.engine or self._node:
            part.check()
        return self.engine is not None and self.engine.is_lost

    def join(self, wait: bool) -> bool:
        """Make this rank's restarted engine available again; return whether it was ready. See HostedEngine.join."""
        return self.engine is not None and self.engine.join(wait)

    def wait_ready(self) -> None:
        """Wait until this rank's engine answers."""
        if self.engine:
            self.engine.wait_ready()

    def begin(self, task: RolloutTask, stream: GroupStream, scorer: Scorer | None = None) -> Future[LaunchedGroups]:
        """Start generating and scoring a task's groups on this rank's engine; return a future of the launched groups.

        `scorer`: None: the run's scorer.
        """
        engine = self.engine
        client = self.client
        if not (engine and client):
            if engine:
                engine.restart()  # the engine was lost while the trainer used its devices, which are free now
                return self._loop.submit(give_back(task, stream))
            launched: Future[LaunchedGroups] = Future()
            launched.set_result(task.carried)
            return launched
        config = self._engine_config
        rule = stream.rule
        groups_per_engine = -(-(rule.launched + rule.lookahead) // len(self.host_ranks))
        max_in_flight = max(1, groups_per_engine)
        most = config.most_groups(self._config)
        fixed = None if config.concurrent_groups == "auto" else most
        if self._limit is None or self._limited is not client:
            self._limit = LaunchLimit(client.load, self._config.max_sequence_tokens, fixed, most)
            self._limited = client
        limit_s = self._config.group_timeout_s
        lose = partial(engine.lose, client=client, generates=True)
        episodes = None
        if self._episodes:
            slots = asyncio.Semaphore((fixed or max_in_flight) * task.group_size)
            self._pause.clear()
            episodes = EpisodeRunner(self._episodes, client, slots, self._pause)
        parts = (client, scorer or self._scorer, self._tokenizer, limit_s, lose, episodes)
        worker = RolloutWorker(
            *parts,
            step_tokens=config.speculative.verified_tokens,
            limit=self._limit,
        )
        return self._loop.submit(worker.run(task, stream, max_in_flight))

    def take_load(self) -> dict[str, float]:
        """Return the metrics of this rank's engine since the last call, see LaunchLimit.take_metrics."""
        return self._limit.take_metrics() if self._limit else {}

    def pause(self, launched: LaunchedGroups) -> Mapping[int, EndedGroup]:
        """Pause this rank's running groups; return all groups except failed ones, by number."""
        with self.losing_engine() as client:
            if client:
                return self._loop.run(pause_running(client, launched, self._pause))
        return {number: group for number, group in launched.items() if not isinstance(group, RunningGroup)}

    def evaluate(
        self, prompts: Sequence[Prompt], eval_set: EvalSetConfig, name: str, step: int, stream: GroupStream
    ) -> tuple[list[SampleGroup], RewardStats] | None:
        """Generate and score the prompts of an eval set that this rank's engine claims; return groups in order.

        Sampling parameters, and the length limit for reward terms, are those of `eval_set`, see `Settings.eval_sets`. A
        group that exceeds its time limit counts as empty samples. Returns None if all engines were lost before all
        prompts were done.
        """
        overrides = eval_set.model_dump(include={"max_response_tokens", "temperature", "top_p"})
        sampling = replace(rollout_sampling(self._config), **overrides, with_kept=False)
        scorer = self._scorer.for_evaluation(sampling.max_response_tokens)
        counts = list[RewardStats]()
        task = RolloutTask(
            *(prompts.__getitem__, eval_set.samples, 0, step, sampling),
            pauses=False,
            seed=rollout_seed(self._seed, self._engine_config, name),
            record=lambda group_id, group, stats: counts.append(stats),
        )
        groups = self.begin(task, stream, scorer).result()
        if not stream.admission().done:
            return None
        end_token = self._tokenizer.eos_token_id
        finished = [
            group
            if group.finished
            else scorer.score_group(unanswered(group.prompt, number, eval_set.samples, end_token), step)
            for number, group in sorted(groups.items())
            if isinstance(group, SampleGroup)
        ]
        return [group for group in finished if group.samples], sum_stats([*counts, scorer.take_stats()])

    def call(self, coroutine):  # type: ignore[no-untyped-def]
        """Run a coroutine of the client in the engine's event loop and return its result."""
        return self._loop.run(coroutine)

    def stop(self) -> None:
        """Stop this rank's engine, reward servers, tool processes and event loop."""
        if part := self.engine or self._node:
            part.stop()
        if self.reward_servers:
            self.reward_servers.stop()
        if self._episodes and not self._loop.is_closed:
            self.call(self._episodes.tools.close())
        self._loop.close()

    def __enter__(self) -> "Rollout":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def rollout_sampling(rollout: RolloutConfig) -> SamplingParams:
    """Return the sampling parameters of training rollouts."""
    limits = (rollout.max_response_tokens, rollout.temperature, rollout.top_p, rollout.stop)
    return SamplingParams(*limits, with_kept=rollout.truncation.is_active)


def rollout_seed(run_seed: int, engine: EngineConfig, prompts: str) -> int | None:
    """Return the sampling seed for `prompts` ("train" or an eval set's name); None without `engine.deterministic`."""
    return sampling_seed(run_seed, prompts) if engine.deterministic else None


def engine_seed(run_seed: int, engine: int) -> int:
    """Return the 31-bit seed of an engine's own random generator."""
    return sampling_seed(run_seed, "engine", engine) >> 32


def base_spec(model: ModelConfig, context_tokens: int, seed: int, rank: int, load_weights: bool = False) -> EngineSpec:
    """Return the specification of an engine that computes as the policy does, on one GPU of a rank.

    `load_weights`: read the weights from `model.path` in place of the first weight sync, see
    `engines_can_load_weights`.
    """
    cpu = not platform.on_cuda()
    return EngineSpec(
        index=rank,
        rank=rank,
        model=model.path,
        dtype=model.dtype,
        context_tokens=context_tokens,
        seed=seed,
        cpu=cpu,
        threads=torch.get_num_threads() if cpu else 1,
        first_gpu=0 if cpu else int(os.environ.get("LOCAL_RANK", 0)),
        trust_remote_code=model.trust_remote_code,
        dummy_weights=not load_weights,
        args={FP32_HEAD: model.fp32_head},
    )


def engine_spec(
    base: EngineSpec, placement: EnginePlacement, parts: RolloutParts, engine: EngineConfig, rollout: RolloutConfig
) -> EngineSpec:
    """Return the specification of the engine process at a placement. `base`: see `base_spec`.

    An engine that need not load weights starts with dummy weights on a GPU, and with the folder's, if any, on a CPU.
    """
    precision = precision_arguments(engine.args, parts.hf, base.cpu)
    in_flight = engine.most_groups(rollout) * rollout.group_size
    defaults = {} if base.cpu else cuda_defaults(engine.args, in_flight, rollout.group_timeout_s)
    own = {ARGUMENT: True} if parts.recorded else {}
    own |= {RETURN_KEYS: True} if parts.recorded and parts.recorded.indexer else {}
    own |= speculative_arguments(engine, rollout)
    own |= {"enable_deterministic_inference": True} if engine.deterministic else {}
    reads_text = bool(rollout.stop) or rollout.function == "openai_agent"
    needs_none = not base.cpu or bool(precision) or not has_hf_weights(base.model)
    return replace(
        base,
        index=placement.engine,
        rank=placement.rank,
        seed=engine_seed(base.seed, placement.engine),
        gpus=engine.gpus_per_engine,
        save_tokenizer=parts.tokenizer.save_pretrained if reads_text else None,
        nodes=placement.nodes,
        node_rank=placement.node_rank,
        dummy_weights=base.dummy_weights and needs_none,
        args=defaults | engine.args | precision | own | dict(base.args),
    )


def engines_can_load_weights(model: ModelConfig, engine: EngineConfig) -> bool:
    """Return whether `model.path` has weights in the precision that `engine.args` sets for engines."""
    cpu = not platform.on_cuda()
    return has_hf_weights(model.path) and not precision_arguments(engine.args, HfConfig.read(model.path), cpu)
