"""Bytes that the weight sync of a planned job moves, computed from the sync plan that the job will use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd, prod

import torch

from grpo_mp.distributed.layout import divisors
from grpo_mp.distributed.shards import shard_holders, tp_size
from grpo_mp.models.families import family_of
from grpo_mp.models.fp8 import FP8
from grpo_mp.models.mapping import Param
from grpo_mp.planner.job import PlannedJob
from grpo_mp.rollout.engine_layout import engine_host_ranks, engine_placements, expert_alignment
from grpo_mp.weight_sync.compare import MAX_TEXTS, comparison_sequences
from grpo_mp.weight_sync.plan import (
    Piece,
    SyncPlan,
    Transfer,
    engine_readers,
    group_params,
    plan_sync,
)
from grpo_mp.weight_sync.wire import WireFormat

MANY_TRANSFERS = 40_000  # planning more expert transfers takes too long, so a sample of experts is planned instead
SAMPLED_EXPERTS = 64  # least experts sampled per layer: every receiver of a node then gets several


@dataclass(frozen=True)
class SyncTraffic:
    """Traffic of the busiest rank in one weight sync. All fields are bytes unless noted."""

    network: float  # sent or received over the network, whichever is more
    nvlink: float  # sent or received over NVLink, whichever is more
    loaded: float  # loaded by the rank's engine
    shards: float  # of shards sent to receivers, or received to be staged, whichever is more
    tensors: float  # number of tensors that one engine rank loads
    quantized: float  # number of elements that the rank quantizes to FP8
    rounds: int


def sync_traffic(job: PlannedJob) -> SyncTraffic:
    """Return the traffic of a full weight sync, extrapolated from one layer of each kind on each pipeline stage.

    Large MoE models are sampled further: only every n-th expert is planned, and its traffic counts n times.
    """
    params = {name: param for name, param in family_of(job.hf).params(job.hf).items() if not param.alias}
    counts = _layers_like(job)
    alike = _experts_alike(job, sum(map(job.is_moe_layer, counts)))
    sample = {
        name: param
        for name, param in params.items()
        if (param.layer is None or param.layer in counts) and (param.expert or 0) % alike == 0
    }
    plan, wire = plan_job_sync(job, sample)
    transfers = [transfer for round_ in plan.rounds for transfer in round_]
    first = [params[transfer.names[0]] for transfer in transfers]
    weights = [counts.get(_layer(param), 1) * (1 if param.expert is None else alike) for param in first]
    network, nvlink, loaded, shards = busiest(transfers, weights, wire, job.gpus_per_node)
    tensors: dict[int, int] = {}
    tensors_of = cache(lambda name: len(wire.specs(Piece(name))))
    for transfer, weight in zip(transfers, weights, strict=True):
        count = weight * sum(map(tensors_of, transfer.names))
        tensors |= {reader: tensors.get(reader, 0) + count for reader in transfer.readers}
    round_bytes = wire.round_bytes(job.settings.sync.bucket_bytes)  # the sample has a group of every size
    rounds = int(-(-max(loaded, shards) // round_bytes))  # a round moves at most `round_bytes` on any rank
    quantized = quantized_elements(transfers, weights, wire)
    return SyncTraffic(
        network, nvlink, loaded, shards, tensors=max(tensors.values()), quantized=quantized, rounds=rounds
    )


def check_lengths(job: PlannedJob) -> list[int]:
    """Return the lengths [tokens] of the sequences that the check after a sync scores."""
    prompts, longest = [(0,) * max(2, job.prompt_tokens)] * MAX_TEXTS, job.settings.rollout.max_sequence_tokens
    return list(map(len, comparison_sequences(prompts, longest)))


def plan_job_sync(job: PlannedJob, params: Mapping[str, Param]) -> tuple[SyncPlan, WireFormat]:
    """Plan the weight sync of `params`, from the job's training layout to its engines."""
    settings = job.settings
    layout = job.settings.layout
    engine = job.settings.engine
    wire = job_wire_format(job, params)
    alignment = expert_alignment(job.engine_parallelism, engine.args, wire.fp8, job.cluster.compute_capability)
    host_ranks = engine_host_ranks(engine_placements(engine, job.world_size, job.gpus_per_node))
    plan = plan_sync(
        group_params(params),
        shard_holders(params, layout, job.train_ranks, job.stage_layers),
        readers=engine_readers(host_ranks, job.engine_parallelism, alignment),
        ranks_per_node=job.gpus_per_node,
        sizes=wire.sizes,
        round_bytes=wire.round_bytes(settings.sync.bucket_bytes),
    )
    return plan, wire


def job_wire_format(job: PlannedJob, params: Mapping[str, Param]) -> WireFormat:
    """Return the format in which `params` are sent to the job's engines."""
    tp_sizes = {name: tp_size(param, job.settings.layout) for name, param in params.items()}
    dtype = torch.bfloat16 if job.settings.model.dtype == "bfloat16" else torch.float32
    return WireFormat(params, tp_sizes, dtype, fp8=job.engine_uses_fp8)


def busiest(
    transfers: list[Transfer], weights: list[int], wire: WireFormat, ranks_per_node: int
) -> tuple[float, float, float, float]:
    """Return (network, nvlink, loaded, shards) in bytes, each the maximum over all ranks; see `SyncTraffic`.

    `weights`: how many times each transfer counts.
    """
    sizes = wire.sizes
    used: dict[tuple[str, str, int], int] = {}

    def add(link: str, direction: str, rank: int, size: int) -> None:
        used[link, direction, rank] = used.get((link, direction, rank), 0) + size

    def send(source: int, target: int, size: int) -> None:
        link = "nvlink" if source // ranks_per_node == target // ranks_per_node else "network"
        add(link, "sends", source, size)
        add(link, "receives", target, size)

    for transfer, weight in zip(transfers, weights, strict=True):
        for source, shard in transfer.shards():
            if source != transfer.receiver:
                send(source, transfer.receiver, weight * sizes.sent(shard))
                add("shards", "sends", source, weight * sizes.sent(shard))
                add("shards", "receives", transfer.receiver, weight * sizes.sent(shard))
        size = weight * sum(map(sizes.staged, transfer.pieces()))
        others = [reader for reader in transfer.readers if reader != transfer.receiver]
        for reader in transfer.readers:
            add("loaded", "", reader, size)
        for reader in others:  # scatter to the readers, then all-gather among them
            send(transfer.receiver, reader, size // len(others))
            add("nvlink", "receives", reader, size - size // len(others))
            add("nvlink", "sends", reader, size - size // len(others))
    network, nvlink, loaded, shards = (
        max((size for (link, *_), size in used.items() if link == name), default=0)
        for name in ("network", "nvlink", "loaded", "shards")
    )
    return network, nvlink, loaded, shards


def quantized_elements(transfers: Sequence[Transfer], weights: Sequence[int], wire: WireFormat) -> float:
    """Return the maximum over ranks of the elements that a rank quantizes to FP8.

    The source quantizes its shards; where a shard boundary cuts an FP8 block, the receiver quantizes the joined tensor.
    `weights`: how many times each transfer counts. A shard sent to several receivers in one round is counted for each
    receiver although it is quantized once.
    """
    by_rank: dict[int, float] = {}
    elements = cache(lambda piece: sum(prod(spec.shape) for spec in wire.specs(piece) if spec.dtype == FP8))
    for transfer, weight in zip(transfers, weights, strict=True):
        for piece, sources in zip(transfer.pieces(), transfer.sources, strict=True):
            at_source = wire.quantizes_shards(piece.name)
            for rank in [source for _, source in sources] if at_source else [transfer.receiver]:
                share = len(sources) if at_source else 1
                by_rank[rank] = by_rank.get(rank, 0.0) + weight * elements(piece) / share
    return max(by_rank.values(), default=0.0)


def _layers_like(job: PlannedJob) -> dict[int, int]:
    """Map a sample layer of each kind (dense, MoE) on each stage to the number of layers of that kind there."""
    counts: dict[int, int] = {}
    # The multi-token-prediction layer is sent only to engines that draft with it.
    sent = job.model.num_layers + job.settings.engine.speculative.drafts_by_mtp
    for layers in ([layer for layer in of_stage if layer < sent] for of_stage in job.stage_layers):
        for is_moe in (False, True):
            alike = [layer for layer in layers if job.is_moe_layer(layer) == is_moe]
            counts |= {alike[0]: len(alike)} if alike else {}
    return counts


def _experts_alike(job: PlannedJob, layers: int) -> int:
    """Return n such that every n-th expert represents n experts held by the same policy and engine ranks.

    n is the smallest divisor that leaves fewer than MANY_TRANSFERS transfers, as long as SAMPLED_EXPERTS experts
    remain. `layers`: number of sampled MoE layers.
    """
    experts, engine = job.engine_parallelism.num_experts, job.engine_parallelism
    if not experts:
        return 1
    of_engine = experts if engine.moves_experts else experts // engine.expert
    counts = [
        n for n in divisors(gcd(experts // job.settings.layout.expert, of_engine)) if experts // n >= SAMPLED_EXPERTS
    ]
    transfers = layers * experts * job.world_size // job.gpus_per_node
    return next((n for n in counts if transfers // n < MANY_TRANSFERS), max(counts, default=1))


def _layer(param: Param) -> int:
    return -1 if param.layer is None else param.layer
