"""Plans over every small layout: each parameter in one bucket, each part once to each target, atoms whole."""

import gc
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, pairwise, product

import pytest

from grpo_mp.config import Layout
from grpo_mp.distributed.coordinates import coordinates
from grpo_mp.models.mapping import Param, Rule, expand
from grpo_mp.platform import spared_collections
from grpo_mp.weight_sync.plan import LocalShard, SyncPlan, Transfer, plan_sync, whole_bytes

LAYERS, EXPERTS = 2, 4
RULES = [
    Rule("embedding", ("e",), ((10, 4),), tp_dim=0, vocabulary=True),
    Rule("layer.{layer}.norm", ("n{layer}",), ((4,),), layers=(0, 1)),
    Rule("layer.{layer}.qkv", ("q{layer}", "k{layer}"), ((8, 4), (4, 4)), tp_dim=0, layers=(0, 1)),
    Rule("layer.{layer}.bias", ("b{layer}",), ((4,),), layers=(0, 1), keep_float32=True),
    Rule("layer.{layer}.w{expert}", ("g{layer}.{expert}",), ((12, 4),), tp_dim=0, layers=(0, 1), experts=EXPERTS),
    Rule("layer.{layer}.v{expert}", ("d{layer}.{expert}",), ((4, 12),), tp_dim=1, layers=(0, 1), experts=EXPERTS),
    Rule("norm", ("n",), ((4,),)),
    Rule("output", ("o",), ((10, 4),), tp_dim=0, vocabulary=True),
]
PARAMS = expand(RULES)
ITEMSIZE = {name: 4 if param.keep_float32 else 2 for name, param in PARAMS.items()}
LARGEST_ATOM = 2 * (8 * 4 + 4 * 4) + 4 * 4 + 2 * 4  # bytes of a layer without its experts
LAYOUTS = [
    (world_size, Layout(tensor=tensor, pipeline=pipeline, expert=expert, expert_tensor=expert_tensor))
    for world_size in (1, 2, 4, 8)
    for tensor, pipeline, expert, expert_tensor in product((1, 2), (1, 2), (1, 2, 4), (1, 2))
    if world_size % (tensor * pipeline) == 0 == world_size % (expert * expert_tensor * pipeline)
]


def held(world_size: int, layout: Layout) -> list[LocalShard]:
    """Layers by stage, experts by expert rank, everything split by its tensor rank; replicas hold the same."""
    holdings = []
    for rank, (name, param) in product(range(world_size), PARAMS.items()):
        coords = coordinates(rank, layout, world_size)
        first, last = coords.pipeline == 0, coords.pipeline == layout.pipeline - 1
        if param.layer is not None and param.layer * layout.pipeline // LAYERS != coords.pipeline:
            continue
        if (name == "embedding" and not first) or (name in ("norm", "output") and not last):
            continue
        if param.expert is not None and param.expert * layout.expert // EXPERTS != coords.expert:
            continue
        part = coords.tensor if param.expert is None else coords.expert_tensor
        holdings.append(LocalShard(name, part if param.tp_dim is not None else 0, rank))
    return holdings


def atom(param: Param) -> object:
    return (param.layer, param.expert) if param.layer is not None else param.name


def check(plan: SyncPlan, holdings: Sequence[LocalShard], targets: Sequence[int], bucket_bytes: int) -> None:
    holders = {(held.name, held.part, held.rank) for held in holdings}
    ranks = {rank for _, _, rank in holders}
    parts = {(name, part) for name, part, _ in holders}
    assert Counter(name for bucket in plan.buckets for name in bucket.names) == Counter(list(PARAMS))
    arrived = Counter((move.name, move.part, move.target) for bucket in plan.buckets for move in bucket.transfers)
    assert arrived == Counter((name, part, target) for name, part in parts for target in targets)
    bucket_of = {name: number for number, bucket in enumerate(plan.buckets) for name in bucket.names}
    for one, other in combinations(PARAMS.values(), 2):
        assert atom(one) != atom(other) or bucket_of[one.name] == bucket_of[other.name]
    for bucket in plan.buckets:
        assert bucket.nbytes == sum(whole_bytes(PARAMS[name], ITEMSIZE[name]) for name in bucket.names)
        assert bucket.nbytes <= bucket_bytes or len({atom(PARAMS[name]) for name in bucket.names}) == 1
        for move in bucket.transfers:
            assert move.name in bucket.names
            assert (move.name, move.part, move.source) in holders
            assert move.source == move.target or (move.name, move.part, move.target) not in holders
            assert move.source in ranks
    assert plan.nbytes == sum(whole_bytes(param, ITEMSIZE[name]) for name, param in PARAMS.items())


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
def test_every_layout_target_set_and_bucket_size(world_size: int, layout: Layout) -> None:
    holdings = held(world_size, layout)
    ranks = range(world_size)
    target_sets = [(0,), tuple(ranks), tuple(ranks[::2]), (world_size - 1,), ()]
    for targets, bucket_bytes in product(target_sets, (1, LARGEST_ATOM, 10**6)):
        check(plan_sync(PARAMS, holdings, targets, bucket_bytes, ITEMSIZE), holdings, targets, bucket_bytes)


def test_buckets_are_filled_in_order_and_a_large_atom_stands_alone() -> None:
    holdings = [LocalShard(name, 0, 0) for name in PARAMS]
    everything = plan_sync(PARAMS, holdings, (0,), 10**6, ITEMSIZE)
    assert len(everything.buckets) == 1
    single = plan_sync(PARAMS, holdings, (0,), 1, ITEMSIZE)
    assert len(single.buckets) == len({atom(param) for param in PARAMS.values()}) == 3 + 2 + 2 * EXPERTS
    two_experts = 2 * (12 * 4 + 4 * 12) * 2
    buckets = plan_sync(PARAMS, holdings, (0,), two_experts, ITEMSIZE).buckets
    assert max(bucket.nbytes for bucket in buckets) == two_experts
    assert all(one.nbytes + other.nbytes > two_experts for one, other in pairwise(buckets))


def test_replicas_share_the_work_and_a_holder_takes_its_own() -> None:
    holdings = [LocalShard(name, 0, rank) for name in PARAMS for rank in (0, 1)]
    moves = plan_sync(PARAMS, holdings, (0, 2, 3, 4, 5), 10**6, ITEMSIZE).buckets[0].transfers
    sources = {target: {move.source for move in moves if move.target == target} for target in (0, 2, 3, 4, 5)}
    assert sources == {0: {0}, 2: {1}, 3: {0}, 4: {1}, 5: {0}}


def test_bytes_are_those_of_the_whole_tensors() -> None:
    assert whole_bytes(PARAMS["layer.0.qkv"], 2) == 2 * (8 * 4 + 4 * 4)
    assert whole_bytes(PARAMS["norm"], 4) == 16


def test_a_parameter_without_a_holder_and_a_hole_in_its_parts_are_refused() -> None:
    holdings = [LocalShard(name, 0, 0) for name in PARAMS]
    with pytest.raises(ValueError, match="no rank holds norm"):
        plan_sync(PARAMS, [one for one in holdings if one.name != "norm"], (0,), 10, ITEMSIZE)
    holes = [LocalShard("embedding", 2, 1) if one.name == "embedding" else one for one in holdings]
    with pytest.raises(ValueError, match=r"embedding: parts \[2\] are held, one is missing"):
        plan_sync(PARAMS, holes, (0,), 10, ITEMSIZE)


def test_millions_of_transfers_take_little_memory_and_no_collection() -> None:
    tracemalloc.start()
    transfers = [Transfer("decoder.layers.3.mlp.experts.17", 0, 3, 5) for _ in range(10_000)]
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert nbytes / len(transfers) < 100
    with spared_collections():
        assert gc.get_freeze_count() >= len(transfers)
        assert not {id(one) for one in gc.get_objects()} & {id(one) for one in transfers}
    assert gc.get_freeze_count() == 0
