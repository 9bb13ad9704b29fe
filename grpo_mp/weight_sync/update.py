"""Weight sync: bring the policy's weights into every engine, as a new version."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, groupby, zip_longest

from grpo_mp import platform
from grpo_mp.config import Settings
from grpo_mp.distributed.process_groups import Parallel, all_gather, make_groups
from grpo_mp.policy.megatron_config import DTYPES
from grpo_mp.policy.policy import Policy
from grpo_mp.rollout.client import EngineClient
from grpo_mp.rollout.engine_parallelism import engine_parallelism
from grpo_mp.rollout.precision import engine_uses_fp8
from grpo_mp.weight_sync.changes import ChangeTracker, keep_changed
from grpo_mp.weight_sync.plan import (
    ROUNDS_IN_MEMORY,
    ParamGroup,
    RankRound,
    engine_readers,
    find_holders,
    group_params,
    plan_sync,
)
from grpo_mp.weight_sync.reshard import Resharder
from grpo_mp.weight_sync.transport import EngineLink, HostTransport, IpcTransport, RunCoroutine, uses_cuda_ipc
from grpo_mp.weight_sync.wire import WireFormat


def plan_rounds(
    wire: WireFormat,
    local_shards: Mapping[str, int],
    readers: Callable[[ParamGroup], Sequence[int]],
    bucket_bytes: int,
    parallel: Parallel,
) -> tuple[RankRound, ...]:
    """Plan to bring the policy's weights to their readers; return this rank's part. Every rank must call this.

    `local_shards`: name -> part on this rank; `bucket_bytes`: staging memory of a rank.
    """
    holders = find_holders(wire.params, all_gather(dict(local_shards), parallel.cpu_group))
    round_bytes = bucket_bytes // ROUNDS_IN_MEMORY
    plan = plan_sync(group_params(wire.params), holders, readers, parallel.ranks_per_node, wire.sizes, round_bytes)
    return plan.of_rank(parallel.rank)


@dataclass(frozen=True)
class SyncReport:
    """Bytes and duration of one sync on this rank.

    `sent`: to other ranks; `staged`: of full tensors that it made readable to its node; `largest_round`: the most that
    it staged at a time.
    """

    version: int
    sent: int
    staged: int
    rounds: int
    largest_round: int
    seconds: float


@dataclass(frozen=True)
class WeightSync:
    """Sends the policy's weights to the engines.

    `link`: None on ranks that are part of no engine; `changes`: None where engines do not keep their weights.
    """

    resharder: Resharder
    link: EngineLink | None
    changes: ChangeTracker | None = None

    def update_weights(self, version: int, all_weights: bool = False) -> SyncReport:
        """Send the weights that changed, or all, as `version`. Every rank must call this.

        Raises UserError where an engine refuses. While the engines load a round, the ranks exchange the next one.
        """
        started = time.monotonic()
        if self.changes and all_weights:
            self.changes.forget()
        rounds = self._rounds()
        staged_bytes = []
        if self.link:
            self.link.begin()
        staged = self.resharder.stage(rounds[0]) if rounds else []
        for round_, following in zip_longest(rounds, rounds[1:]):
            staged_bytes.append(sum(tensor.nbytes for _, tensor in staged))
            with self.link.loading(round_, staged) if self.link else nullcontext():
                staged = self.resharder.stage(following) if following else []
        if self.link:
            self.link.end(version)
        return SyncReport(
            version=version,
            sent=sum(map(self.resharder.sent_bytes, rounds)),
            staged=sum(staged_bytes),
            rounds=len(rounds),
            largest_round=max(staged_bytes, default=0),
            seconds=time.monotonic() - started,
        )

    def _rounds(self) -> Sequence[RankRound]:
        """Return the rounds of what has to be sent, as many on every rank."""
        if not self.changes:
            return self.resharder.rounds
        changed = self.changes.take_changes(self.resharder.tensors)
        return keep_changed(self.resharder.rounds, changed, group_params(self.resharder.wire.params))


def build_weight_sync(
    settings: Settings, policy: Policy, host_ranks: Sequence[int], client: EngineClient | None, run: RunCoroutine
) -> WeightSync:
    """Plan the sync and link each rank to its engine. Every rank must call this.

    `host_ranks`: each engine's first rank, the only one that has its `client`.
    """
    args, gpus, limit_s = settings.engine.args, settings.engine.gpus_per_engine, settings.monitor.phase_timeout_s
    fp8, parallel = engine_uses_fp8(args, policy.hf, cpu=not platform.on_cuda()), policy.parallel
    wire = WireFormat(policy.params, policy.tp_sizes(), DTYPES[settings.model.dtype], fp8)
    readers = engine_readers(host_ranks, engine_parallelism(gpus, args, policy.hf))
    rounds = plan_rounds(wire, policy.local_shards(), readers, settings.sync.bucket_bytes, parallel)
    engines = [range(host, host + gpus) for host in host_ranks]
    nodes = groupby(chain.from_iterable(engines), key=lambda rank: rank // parallel.ranks_per_node)
    engine_group = make_groups(engines, limit_s)
    node_group = make_groups([list(ranks) for _, ranks in nodes], limit_s)
    link = None
    if engine_group and node_group:
        transport = IpcTransport(wire) if uses_cuda_ipc(settings.sync) else HostTransport(wire, node_group)
        link = EngineLink(client, run, transport, engine_group, node_group, settings.sync.timeout_s)
    changes = None
    if settings.sync.delta and engine_keeps_weights(settings):
        changes = ChangeTracker([name for name, param in wire.params.items() if not param.alias], parallel.cpu_group)
    return WeightSync(Resharder(rounds, wire, policy.tensors), link, changes)


def engine_keeps_weights(settings: Settings) -> bool:
    """Tell whether an engine has its weights from one sync to the next; otherwise it frees them while it sleeps."""
    sleeps = settings.model.offloads and platform.on_cuda()
    return not sleeps or bool(settings.engine.args.get("enable_weights_cpu_backup"))
