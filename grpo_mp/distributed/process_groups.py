"""Process groups: torch.distributed for the job, Megatron's groups for the layout, one group per replica."""

import datetime
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from grpo_mp import platform
from grpo_mp.config import Layout
from grpo_mp.distributed.coordinates import RankCoordinates, coordinates, data_parallel, model_parallel_ranks
from grpo_mp.distributed.rendezvous import rendezvous


@dataclass(frozen=True)
class Parallel:
    """This rank's place in the job, and the groups that Megatron does not make."""

    layout: Layout
    rank: int
    world_size: int
    coords: RankCoordinates
    data_parallel: int
    replica: dist.ProcessGroup  # host-memory group of the ranks that train on the same samples
    cpu_group: dist.ProcessGroup  # host-memory group of all ranks
    store: dist.Store  # small numbers known to the whole job

    @property
    def replica_source(self) -> int:
        """The rank that receives the replica's samples and passes them on."""
        return model_parallel_ranks(self.coords.data, self.layout, self.world_size)[0]


def megatron_sizes(layout: Layout) -> dict[str, int | None]:
    """The layout as Megatron's initialize_model_parallel takes it."""
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
    }


def start_parallel(layout: Layout, seed: int, timeout_s: float, name: str = "job") -> Parallel:
    """Join the job that torchrun or srun describes in the environment and make every group.

    Processes that left with `stop_parallel` may join again, under another `name`. Raises UserError where
    they cannot meet.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    store, rank, world_size = rendezvous(timeout)
    store = dist.PrefixStore(name, store)
    dist.init_process_group(platform.backend(), store=store, rank=rank, world_size=world_size, timeout=timeout)
    parallel_state.initialize_model_parallel(
        **megatron_sizes(layout),
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        create_gloo_process_groups=True,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    copies = data_parallel(layout, world_size)
    replicas = [
        dist.new_group(list(model_parallel_ranks(data, layout, world_size)), backend="gloo", timeout=timeout)
        for data in range(copies)
    ]
    # NCCL connects all ranks in the first call, and what a sync sends is between some of them.
    dist.all_reduce(torch.zeros(1, device=platform.device()))
    coords = coordinates(rank, layout, world_size)
    return Parallel(
        layout=layout,
        rank=rank,
        world_size=world_size,
        coords=coords,
        data_parallel=copies,
        replica=replicas[coords.data],
        cpu_group=dist.new_group(backend="gloo", timeout=timeout),
        store=store,
    )


def sum_over_context(values: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """The sum over the ranks that hold parts of the same sequences; every one of them must call this."""
    if parallel.layout.context == 1:
        return values
    moved = values.to(platform.device())
    dist.all_reduce(moved, group=parallel_state.get_context_parallel_group())
    return moved.to(values.device)


def context_reduction(parallel: Parallel) -> Callable[[torch.Tensor], torch.Tensor]:
    """`sum_over_context` of this job."""
    return partial(sum_over_context, parallel=parallel)


@contextmanager
def single_process_group() -> Iterator[None]:
    """Make this process a job of one rank while the body runs, whatever started it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    before = {name: os.environ.get(name) for name in job}
    os.environ.update(job)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def stop_parallel() -> None:
    """Leave the job; every group ends."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
