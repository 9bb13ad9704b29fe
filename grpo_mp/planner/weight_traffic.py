"""What the weight sync of a planned job sends, by the plan that the job itself will follow."""

from dataclasses import dataclass

import torch

from grpo_mp.distributed.shards import shards_by_rank, tp_size
from grpo_mp.models.families import family_of
from grpo_mp.planner.job import Job
from grpo_mp.rollout.placement import engine_hosts, engine_placements
from grpo_mp.weight_sync.plan import Delivery, SyncPlan, atoms_of, engine_readers, find_holders, plan_sync
from grpo_mp.weight_sync.update import ROUNDS_IN_MEMORY
from grpo_mp.weight_sync.wire import WireFormat


@dataclass(frozen=True)
class RoundTraffic:
    """Bytes of one round, by rank: those that the busiest rank sends or receives over a link."""

    network: int
    nvlink: int
    loaded: int  # the most that one rank's engine loads


def plan_job_sync(job: Job) -> tuple[SyncPlan, WireFormat]:
    """Plan the weight sync of a job: its layout to its engines."""
    settings, layout = job.settings, job.settings.layout
    params = family_of(job.hf).params(job.hf)
    wire = WireFormat(
        params,
        {name: tp_size(param, layout) for name, param in params.items()},
        torch.bfloat16 if settings.model.dtype == "bfloat16" else torch.float32,
        fp8=job.engine_in_fp8,
    )
    engine = settings.engine
    hosts = engine_hosts(
        engine_placements(job.world_size, job.gpus_per_node, engine.gpus_per_engine, engine.num_engines)
    )
    plan = plan_sync(
        atoms_of(params),
        find_holders(params, shards_by_rank(params, layout, job.world_size, job.stage_layers)),
        engine_readers(hosts, job.engine_parallelism),
        job.gpus_per_node,
        wire.sizes,
        settings.sync.bucket_bytes // ROUNDS_IN_MEMORY,
    )
    return plan, wire


def round_traffic(deliveries: tuple[Delivery, ...], wire: WireFormat, ranks_per_node: int) -> RoundTraffic:
    """Add up what each rank sends and receives in one round, and return the most of each."""
    sizes = wire.sizes
    network: dict[tuple[str, int], int] = {}
    nvlink: dict[tuple[str, int], int] = {}
    loaded: dict[int, int] = {}

    def send(source: int, target: int, size: int) -> None:
        link = nvlink if source // ranks_per_node == target // ranks_per_node else network
        link["sends", source] = link.get(("sends", source), 0) + size
        link["receives", target] = link.get(("receives", target), 0) + size

    for delivery in deliveries:
        for source, shard in delivery.shards():
            if source != delivery.stager:
                send(source, delivery.stager, sizes.sent(shard))
        size = sum(map(sizes.staged, delivery.names))
        for reader in delivery.readers:
            loaded[reader] = loaded.get(reader, 0) + size
            if reader != delivery.stager:
                send(delivery.stager, reader, size)
    return RoundTraffic(*(max(link.values(), default=0) for link in (network, nvlink, loaded)))
