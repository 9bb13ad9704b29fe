"""Weight sync: plans and executes the update of every engine to the policy's weights."""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, groupby

import torch.distributed as dist
from torch import Tensor

from grpo_mp import platform
from grpo_mp.config.sections import EngineConfig, LayoutConfig, ModelConfig, SyncConfig
from grpo_mp.distributed.coordinates import tp_size
from grpo_mp.distributed.process_groups import Job, all_gather, make_groups
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param
from grpo_mp.models.multi_token_prediction import engine_params
from grpo_mp.policy.megatron_config import DTYPES
from grpo_mp.policy.policy import Policy
from grpo_mp.rollout.engine_layout import engine_format, engine_parallelism, expert_alignment
from grpo_mp.rollout.rollout import Rollout
from grpo_mp.weight_sync.plan import (
    RankRound,
    Readers,
    engine_readers,
    find_holders,
    group_params,
    plan_sync,
)
from grpo_mp.weight_sync.reshard import Resharder
from grpo_mp.weight_sync.transport import EngineLink, HostTransport, IpcTransport
from grpo_mp.weight_sync.wire import WireFormat


def plan_rounds(
    wire: WireFormat,
    local_shards: Mapping[str, int],
    readers: Readers,
    bucket_bytes: int | None,
    group: dist.ProcessGroup,
    ranks_per_node: int,
) -> tuple[RankRound, ...]:
    """Plan the sync of the policy's weights to their readers; return this rank's work in each round.

    `local_shards`: parameter name -> tensor-parallel part on this rank; `readers`: ranks that load each group;
    `bucket_bytes`: memory of a rank for weights in transit; None: the default.
    """
    holders = find_holders(wire.params, all_gather(dict(local_shards), group), wire.parts)
    round_bytes = wire.round_bytes(bucket_bytes)
    plan = plan_sync(
        group_params(wire.params),
        holders,
        readers=readers,
        ranks_per_node=ranks_per_node,
        sizes=wire.sizes,
        round_bytes=round_bytes,
    )
    return plan.of_rank(dist.get_rank(group))


@dataclass(frozen=True)
class SyncReport:
    """Statistics of one sync on this rank.

    `engines`: number of updated engines that this rank hosts; `sent`: bytes sent to other ranks; `staged`: bytes of the
    tensors that this rank staged for engines of its node; `rounds`: number of rounds.
    """

    version: int
    engines: int
    sent: int
    staged: int
    rounds: int
    seconds: float


def largest_report(reports: Sequence[SyncReport]) -> SyncReport:
    """Return a report with the maximum of each field over the ranks, except `engines`, which is the sum."""
    fields = [vars(report) for report in reports]
    largest = SyncReport(**{name: max(values[name] for values in fields) for name in fields[0]})
    return replace(largest, engines=sum(report.engines for report in reports))


@dataclass(frozen=True)
class WeightSync:
    """One rank's part in sending the policy's weights to the engines. `link`: None on ranks without an engine."""

    resharder: Resharder
    link: EngineLink | None

    def update_weights(self, version: int) -> SyncReport:
        """Send all weights to the engines as version `version` and return statistics.

        While the engines load a round, the ranks exchange the next round. Raises UserError if an engine rejects a
        request.
        """
        started = time.monotonic()
        rounds = self.resharder.rounds
        staged_bytes = 0
        stages = self.resharder.stages(rounds)
        if self.link:
            self.link.begin()
        staged = next(stages, [])
        for round_ in rounds:
            staged_bytes += sum(tensor.nbytes for _, tensor in staged)
            with self.link.loading(round_, staged) if self.link else nullcontext():
                staged = next(stages, [])
        if self.link:
            self.link.end(version)
        return SyncReport(
            version=version,
            engines=int(self.link is not None and self.link.rollout.client is not None),
            sent=sum(map(self.resharder.sent_bytes, rounds)),
            staged=staged_bytes,
            rounds=len(rounds),
            seconds=time.monotonic() - started,
        )


@dataclass(frozen=True)
class PolicyShards:
    """Shards of the policy's weights on one rank; ranks that only host engines have no shards.

    `params`, `tp_sizes`: parameters of the full model and their tensor-parallel sizes; `tensors`: this rank's shards by
    parameter name; `parts`: index of the tensor-parallel part in `tensors`, by parameter name.
    """

    hf: HfConfig
    params: Mapping[str, Param]
    tp_sizes: Mapping[str, int]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    parts: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of_policy(cls, policy: Policy) -> "PolicyShards":
        """Return the shards of a training rank."""
        return cls(policy.hf, policy.base_params, policy.tp_sizes(), policy.weights, policy.weight_shards())

    @classmethod
    def none(cls, hf: HfConfig, layout: LayoutConfig) -> "PolicyShards":
        """Return an empty set of shards, for an engine-only rank. `layout`: layout of the training ranks."""
        params = family_of(hf).params(hf)
        return cls(hf, params, {name: tp_size(param, layout) for name, param in params.items()})


def build_weight_sync(
    engine: EngineConfig, model: ModelConfig, sync: SyncConfig, shards: PolicyShards, rollout: Rollout, job: Job
) -> WeightSync:
    """Plan the sync and link this rank to its engine. The engines must be running."""
    args = engine.args
    drafts = engine.speculative.drafts_by_mtp
    form = engine_format(args, shards.hf, cpu=not platform.on_cuda())
    params = engine_params(shards.params, shards.hf, drafts)
    parts = {name: part for name, part in shards.parts.items() if name in params}
    wire = WireFormat(params, shards.tp_sizes, DTYPES[model.dtype], form)
    parallelism = engine_parallelism(engine.gpus_per_engine, args, shards.hf)
    alignment = expert_alignment(parallelism, args, form, platform.compute_capability())
    readers = engine_readers(rollout.host_ranks, parallelism, alignment)
    per_node = job.ranks_per_node
    rounds = plan_rounds(wire, parts, readers, sync.bucket_bytes, group=job.group, ranks_per_node=per_node)
    link = None
    if job.hosts_engines:
        engine_group, node_group = _engine_groups(rollout.host_ranks, engine.gpus_per_engine, job)
        if engine_group and node_group:
            transport: IpcTransport | HostTransport = HostTransport(wire, node_group, job.rank)
            if platform.on_cuda():
                transport = IpcTransport(wire, job.rank, job.device_group)
            pause = sync.pause if rollout.owns_devices else None
            with_draft = model.trains_mtp and drafts
            link = EngineLink(rollout, transport, engine_group, node_group, pause=pause, with_draft=with_draft)
    return WeightSync(Resharder(rounds, wire, shards.tensors, job.device_group), link)


def _engine_groups(host_ranks: Sequence[int], gpus: int, job: Job) -> list[dist.ProcessGroup | None]:
    """Create the gloo groups of each engine and of each node's engines; return this rank's groups.

    Collective over all ranks that may host engines.
    """
    first = job.rank - dist.get_rank()  # the job's rank that is rank 0 of torch's default group
    engines = [list(range(host - first, host - first + gpus)) for host in host_ranks]
    nodes = groupby(chain.from_iterable(engines), lambda rank: (rank + first) // job.ranks_per_node)
    return [make_groups(groups, job.timeout_s) for groups in (engines, [list(ranks) for _, ranks in nodes])]
