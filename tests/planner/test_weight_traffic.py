"""The plan of the weight sync that a run follows, beside the planner's estimates of its bytes."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from grpo_mp.config import load_settings
from grpo_mp.distributed.coordinates import tp_size
from grpo_mp.models.families import family_of
from grpo_mp.models.mapping import Param
from grpo_mp.planner.clusters import OVERHEADS, read_cluster
from grpo_mp.planner.engine_use import sync_use
from grpo_mp.planner.job import PlannedJob, make_job
from grpo_mp.planner.memory import SubPhase, plan_memory
from grpo_mp.planner.model_configs import named_config
from grpo_mp.rollout.engine_layout import engine_host_ranks, engine_placements, expert_alignment
from grpo_mp.weight_sync.plan import ROUNDS_IN_MEMORY, Piece, Transfer, engine_readers, group_params, plan_sync
from grpo_mp.weight_sync.wire import WireFormat
from tests.shard_holders import shard_holders

GB = 1e9


def plan_job_sync(job: PlannedJob, params: Mapping[str, Param]) -> tuple[list[list[Transfer]], WireFormat]:
    settings = job.settings
    layout = job.settings.layout
    tp_sizes = {name: tp_size(param, layout) for name, param in params.items()}
    wire = WireFormat(params, tp_sizes, torch.bfloat16, job.engine_format)
    hosts = engine_host_ranks(engine_placements(settings.engine, job.world_size, job.gpus_per_node))
    alignment = expert_alignment(job.engine_parallelism, settings.engine.args, wire.format, 9.0)
    plan = plan_sync(
        group_params(params),
        shard_holders(params, layout, job.train_ranks, job.stage_layers),
        readers=engine_readers(hosts, job.engine_parallelism, alignment),
        ranks_per_node=job.gpus_per_node,
        sizes=wire.sizes,
        round_bytes=wire.round_bytes(settings.sync.bucket_bytes),
    )
    return [list(round_) for round_ in plan.rounds], wire


@pytest.mark.parametrize("bucket", ["null", "4GiB"])
def test_no_round_is_larger_than_its_line_in_the_plan(bucket: str) -> None:
    """That line is sync.bucket_bytes; without it, here, four times the embedding, which an engine loads at once."""
    settings = load_settings(Path("configs/qwen3_30b_a3b.yaml"), [f"sync.bucket_bytes={bucket}"])
    job = make_job(settings, named_config("Qwen3-30B-A3B"), read_cluster("h100-80"), nodes=1)
    rounds, wire = plan_job_sync(job, family_of(job.hf).params(job.hf))
    rounds_bytes = plan_memory(job).device[0][SubPhase.SYNC]["sync rounds"]
    assert rounds_bytes == (settings.sync.bucket_bytes or 4 * 151936 * 2048 * 2)
    largest = 0.0
    for round_ in rounds:
        uses = Counter[tuple[str, int]]()
        for transfer in round_:
            size = sum(map(wire.sizes.staged, transfer.pieces()))
            uses.update({("loads", reader): size for reader in transfer.readers})
            for source, shard in transfer.shards():
                if source != transfer.receiver:
                    uses["sends", source] += wire.sizes.sent(shard)
                    uses["receives", transfer.receiver] += wire.sizes.sent(shard)
        largest = max(largest, *uses.values())
    assert 0.9 * rounds_bytes < ROUNDS_IN_MEMORY * largest <= rounds_bytes


def test_an_engine_rank_receives_little_more_than_it_keeps() -> None:
    """Within 1.05 of its experts, written out from the model's shape, and what is copied once for each node."""
    settings = load_settings(Path("configs/moe_671b.yaml"), [])
    r1 = make_job(settings, named_config("DeepSeek-R1"), read_cluster("h100-80"), nodes=16)
    params = {name: param for name, param in family_of(r1.hf).params(r1.hf).items() if not param.alias}
    rounds, wire = plan_job_sync(r1, params)
    loaded = Counter[int]()
    received = Counter[int]()
    for transfer in (transfer for round_ in rounds for transfer in round_):
        for reader in transfer.readers:
            loaded[reader] += sum(map(wire.sizes.staged, transfer.pieces()))
        for source, shard in transfer.shards():
            if source // r1.gpus_per_node != transfer.receiver // r1.gpus_per_node:
                received[transfer.receiver] += wire.sizes.sent(shard)
    block_scales = 1 + 4 / 128**2
    experts = 58 * 256 * 3 * 7168 * 2048 * block_scales / r1.settings.engine.gpus_per_engine
    others = sum(wire.sizes.staged(Piece(name)) for name, param in wire.params.items() if param.expert is None)
    assert len(loaded) == r1.world_size
    assert max(loaded.values()) - others <= 1.05 * experts
    assert max(received.values()) < 13 * GB  # the whole model, 1,271 GB in bfloat16, would be sent without the plan
    planned = sync_use(r1)
    assert planned.nvlink_bytes / OVERHEADS.sync_unevenness == pytest.approx(max(loaded.values()), rel=0.02)
    assert planned.network_bytes / OVERHEADS.sync_unevenness == pytest.approx(max(received.values()), rel=0.4)
