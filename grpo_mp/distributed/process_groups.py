"""Process groups: torch.distributed for the job, Megatron's for the layout, one gloo group per model replica."""

import datetime
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from grpo_mp import platform
from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.coordinates import RankCoordinates, coordinates, data_parallel_size, model_parallel_ranks
from grpo_mp.distributed.rendezvous import rendezvous

platform.prepare()  # makes Megatron importable without a GPU

from megatron.core import parallel_state, tensor_parallel  # noqa: E402

Value = TypeVar("Value")
# Phases of training ranks that engine ranks wait for in one collective: LOGPROB, TRAIN (policy, critic), SAVE, SYNC.
WAITED_PHASES = 5


@dataclass(frozen=True)
class Job:
    """All ranks of the job: training ranks first, then ranks that only host engines (`engine.ranks`).

    Both kinds have default groups of their own in torch, because Megatron divides a model over its whole default group.
    """

    rank: int
    world_size: int
    engine_ranks: int  # 0: training ranks also host the engines
    group: dist.ProcessGroup  # gloo group of all ranks
    device_group: dist.ProcessGroup  # group of all ranks for tensors on the device
    store: dist.Store  # key-value store of the job
    ranks_per_node: int
    timeout_s: float  # of collectives

    @property
    def trains(self) -> bool:
        return self.rank < self.world_size - self.engine_ranks

    @property
    def hosts_engines(self) -> bool:
        return not (self.engine_ranks and self.trains)


@dataclass(frozen=True)
class Parallel:
    """Coordinates of a training rank, and its process groups in addition to Megatron's parallel_state."""

    layout: LayoutConfig
    rank: int
    world_size: int  # number of training ranks
    coords: RankCoordinates
    dp_size: int
    replica: dist.ProcessGroup  # gloo group of the ranks of this model replica
    cpu_group: dist.ProcessGroup  # gloo group of all training ranks
    job: Job

    @property
    def replica_source(self) -> int:
        return model_parallel_ranks(self.coords.data, self.layout, self.world_size)[0]

    @property
    def is_reporting_rank(self) -> bool:
        return self.coords.tensor == 0 and self.coords.pipeline == self.layout.pipeline - 1


def megatron_sizes(layout: LayoutConfig) -> dict[str, int | None]:
    """Return the layout as keyword arguments of Megatron's initialize_model_parallel."""
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
    }


def start_parallel(layout: LayoutConfig, seed: int, timeout_s: float, name: str = "job") -> Parallel:
    """Join a job in which all ranks train, and create all process groups.

    After `stop_parallel` a process may join again under another `name`.
    """
    return make_parallel(join_job(timeout_s, name=name), layout, seed)


def join_job(timeout_s: float, engine_ranks: int = 0, name: str = "job") -> Job:
    """Join the job that torchrun's or srun's environment describes. `engine_ranks`: ranks that only host engines."""
    timeout = datetime.timedelta(seconds=timeout_s)
    store, rank, world_size = rendezvous(timeout)
    store = dist.PrefixStore(name, store)
    train_ranks = world_size - engine_ranks
    if rank < train_ranks:
        own_store = dist.PrefixStore("train", store)
        dist.init_process_group(platform.backend(), store=own_store, rank=rank, world_size=train_ranks, timeout=timeout)
    else:
        own_store = dist.PrefixStore("engines", store)
        own_rank = rank - train_ranks
        dist.init_process_group("gloo", store=own_store, rank=own_rank, world_size=engine_ranks, timeout=timeout)
    if engine_ranks:
        long = WAITED_PHASES * timeout
        group = device_group = _join_group("gloo", store, rank=rank, world_size=world_size, timeout=long)
        if platform.backend() != "gloo":
            device_group = _join_group(platform.backend(), store, rank=rank, world_size=world_size, timeout=long)
    else:
        group = dist.new_group(backend="gloo", timeout=timeout)
        default = dist.group.WORLD
        assert default is not None  # init_process_group made it
        device_group = default
    # NCCL connects all ranks in the first collective; the weight sync's sends involve only some of them.
    dist.all_reduce(torch.zeros(1, device=platform.device()), group=device_group)
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return Job(
        rank,
        world_size,
        engine_ranks=engine_ranks,
        group=group,
        device_group=device_group,
        store=store,
        ranks_per_node=ranks_per_node,
        timeout_s=timeout_s,
    )


def _join_group(
    backend: str, store: dist.Store, rank: int, world_size: int, timeout: datetime.timedelta
) -> dist.ProcessGroup:
    """Create a process group of ranks beyond torch's default group, as SGLang's `init_custom_process_group` does.

    Ranks are numbered relative to this rank's number in the default group, so that `dist.get_rank(group)` is right.
    Address peers by their rank in the group (`group_dst`, `group_src`).
    """
    name = distributed_c10d.GroupName(f"job_{backend}")
    group, _ = distributed_c10d._new_process_group_helper(
        world_size, rank, [], distributed_c10d.Backend(backend), dist.PrefixStore(name, store), name, timeout=timeout
    )
    offset = rank - dist.get_rank()
    distributed_c10d._world.pg_group_ranks[group] = {other - offset: other for other in range(world_size)}
    return group


def make_parallel(job: Job, layout: LayoutConfig, seed: int) -> Parallel:
    """Create the process groups of a layout over all training ranks."""
    timeout = datetime.timedelta(seconds=job.timeout_s)
    parallel_state.initialize_model_parallel(
        **megatron_sizes(layout),
        distributed_timeout_minutes=max(1, round(job.timeout_s / 60)),
        create_gloo_process_groups=True,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    dp_size = data_parallel_size(layout, world_size)
    replica_groups = [
        dist.new_group(list(model_parallel_ranks(data, layout, world_size)), backend="gloo", timeout=timeout)
        for data in range(dp_size)
    ]
    coords = coordinates(rank, layout, world_size)
    return Parallel(
        layout=layout,
        rank=rank,
        world_size=world_size,
        coords=coords,
        dp_size=dp_size,
        replica=replica_groups[coords.data],
        cpu_group=dist.new_group(backend="gloo", timeout=timeout) if job.engine_ranks else job.group,
        job=job,
    )


def make_groups(groups: Iterable[Sequence[int]], timeout_s: float) -> dist.ProcessGroup | None:
    """Create a gloo group for each set of ranks; return the group of this rank, or None."""
    timeout = datetime.timedelta(seconds=timeout_s)  # torch would use its own default timeout
    own = None
    for ranks in groups:
        group = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
        own = group if dist.get_rank() in ranks else own
    return own


def all_gather(value: Value, group: dist.ProcessGroup | None) -> list[Value]:
    """Return the values of all ranks of a group, by rank; values are pickled."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast(value: Value, group: dist.ProcessGroup) -> Value:
    """Return the value of the group's first rank; the value is pickled."""
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def sum_over_context(values: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """Return the sum of `values` over the context-parallel group, on the device of `values`."""
    if parallel.layout.context == 1:
        return values
    total = values.to(platform.device())
    dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
    return total.to(values.device)


def replica_groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the device groups of ranks with this rank's dense weights, and of ranks with its experts."""
    dense: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts: dist.ProcessGroup = parallel_state.get_expert_data_parallel_group()
    return dense, experts


@contextmanager
def single_rank_environment() -> Iterator[None]:
    """Set the environment variables of a one-rank job while the `with` body runs; restore them afterwards."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # one rank opens no socket there
    saved = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in saved.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def stop_parallel() -> None:
    """Destroy all process groups, including Megatron's."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
