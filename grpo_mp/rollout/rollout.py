"""Everything a rank does for generation: its engine process, its client, and its share of the work."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from grpo_mp import platform
from grpo_mp.checkpoint.hf_reader import has_hf_weights
from grpo_mp.config import Settings
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.rewards.score import Scorer
from grpo_mp.rollout.client import EngineClient, Sampling
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.placement import EnginePlacement, engine_hosts, engine_placements
from grpo_mp.rollout.ports import own_address
from grpo_mp.rollout.precision import precision_arguments
from grpo_mp.rollout.queue import WorkQueue
from grpo_mp.rollout.server import EngineProcess
from grpo_mp.rollout.worker import RolloutTask, RolloutWorker
from grpo_mp.types import Prompt, SampleGroup


class Rollout:
    """The engines of the job as one rank sees them; a rank without an engine has nothing to do here."""

    def __init__(
        self,
        settings: Settings,
        tokenizer: PreTrainedTokenizerBase,
        scorer: Scorer,
        rank: int,
        world_size: int,
        own_weights: bool = False,
    ) -> None:
        """Plan the places; nothing is started. Raises UserError for places that do not fit or unknown arguments.

        `own_weights`: engines read the folder's weights and no synchronization follows; see `reads_weights`.
        """
        self._settings, self._tokenizer, self._scorer = settings, tokenizer, scorer
        self._own_weights = own_weights
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        places = engine_placements(world_size, per_node, settings.engine.gpus, settings.engine.count)
        self.hosts = engine_hosts(places)
        self.place = next((place for place in places if place.rank == rank), None)
        self._process = self._make_process(self.place) if self.place else None
        self._runner = asyncio.Runner()
        self.client: EngineClient | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that an engine spans."""
        size = self._settings.engine.gpus
        return tuple(rank for host in self.hosts for rank in range(host, host + size))

    @property
    def is_host(self) -> bool:
        return self.place is not None and self.place.is_host

    def start(self, store: dist.Store) -> None:
        """Start this rank's engine process, if it has one. Returns at once, but on an engine's further nodes
        after its first has started: the job's `store` tells them where that is.
        """
        if not (self._process and self.place):
            return
        where = f"engine/{self.place.engine}/meeting"
        if self.place.nodes == 1:
            self._process.start()
        elif self.place.is_host:
            store.set(where, self._process.start(host=own_address()) or "")
        else:
            self._process.start(meeting=store.get(where).decode())

    def wait_ready(self) -> None:
        """Return when this rank's engine answers."""
        if not (self._process and self.is_host and self.place):
            return
        engine = self._settings.engine
        self._process.wait_ready(engine.start_timeout_s)
        self.client = EngineClient(
            self.place.engine, self._process.url, self._process.headers, engine.request_timeout_s
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        first_group_id: int,
        step: int,
        store: dist.Store,
        name: str,
        enough: int | None,
    ) -> list[SampleGroup]:
        """The groups that this rank's engine generated and scored. `name` is new in the job each time.

        `enough`: groups of the whole job after which those in flight are broken off; null: none is.
        """
        size = self._settings.rollout.group_size
        return self._work(RolloutTask(prompts, size, first_group_id, step, self._sampling(), enough), name, store)

    def evaluate(self, prompts: Sequence[Prompt], name: str, step: int, store: dist.Store) -> list[SampleGroup]:
        """The scored samples of each prompt of this eval set that this rank's engine took, drawn as the set says."""
        wanted = self._settings.eval_set(name)
        own = wanted.model_dump(include={"max_response_tokens", "temperature", "top_p"})
        sampling = replace(self._sampling(), **own)
        return self._work(RolloutTask(prompts, wanted.samples, 0, step, sampling), f"eval/{name}/{step}", store)

    def call(self, coroutine):  # type: ignore[no-untyped-def]
        """Run one of the client's coroutines to its end."""
        return self._runner.run(coroutine)

    def check_alive(self, phase: str) -> None:
        """Raises UserError with the log's last lines where this rank's engine has ended."""
        if self._process:
            self._process.check_alive(f"in {phase}")

    def stop(self) -> None:
        """End this rank's engine and connections."""
        if self.client:
            self._runner.run(self.client.close())
        self._runner.close()
        if self._process:
            self._process.stop()

    def __enter__(self) -> "Rollout":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _work(self, task: RolloutTask, name: str, store: dist.Store) -> list[SampleGroup]:
        if self.client is None:
            return []
        settings = self._settings
        share = -(-len(task.prompts) // len(self.hosts))
        in_flight = max(1, min(settings.engine.concurrent_groups, share))
        worker = RolloutWorker(self.client, self._scorer, self._tokenizer, settings.rollout.group_timeout_s)
        return self._runner.run(worker.run(task, WorkQueue(store, name, len(task.prompts)), in_flight))

    def _sampling(self) -> Sampling:
        wanted = self._settings.rollout
        return Sampling(wanted.max_response_tokens, wanted.temperature, wanted.top_p, wanted.stop)

    def _make_process(self, place: EnginePlacement) -> EngineProcess:
        settings, cpu = self._settings, not platform.on_cuda()
        first_gpu = 0 if cpu else int(os.environ.get("LOCAL_RANK", 0))
        spec = engine_spec(settings, HfConfig.read(settings.model.path), place, cpu, first_gpu, self._own_weights)
        return EngineProcess(spec, settings.run.folder / "logs" / f"engine_{place.engine}.log")


def engine_spec(
    settings: Settings, hf: HfConfig, place: EnginePlacement, cpu: bool, first_gpu: int = 0, own_weights: bool = False
) -> EngineSpec:
    """The engine at a place as the settings want it; `first_gpu` is a device number of its node.

    An engine on a GPU never reads weights: the first synchronization would overwrite what each of its ranks had read.
    With `own_weights` there is no synchronization, and it reads them; see `reads_weights`.
    """
    precision = precision_arguments(settings.engine.args, hf, cpu)
    return EngineSpec(
        index=place.engine,
        rank=place.rank,
        model=settings.model.path,
        dtype=settings.model.dtype,
        context_tokens=settings.rollout.max_prompt_tokens + settings.longest_response,
        seed=settings.run.seed + place.engine,
        gpus=settings.engine.gpus,
        cpu=cpu,
        stop_strings=bool(settings.rollout.stop),
        first_gpu=first_gpu,
        nodes=place.nodes,
        node_rank=place.node_rank,
        dummy=not own_weights and (not cpu or bool(precision) or not has_hf_weights(settings.model.path)),
        args=settings.engine.args | precision,
    )


def reads_weights(settings: Settings) -> bool:
    """Whether engines can read the weights of `model.path` and compute as `engine.args` says: in its own precision."""
    folder, cpu = settings.model.path, not platform.on_cuda()
    return has_hf_weights(folder) and not precision_arguments(settings.engine.args, HfConfig.read(folder), cpu)
