"""Plans over every small layout: each parameter in one bucket, each part once to each target, no atom split."""

import gc
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, pairwise, product
from math import prod

import pytest

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.coordinates import coordinates
from grpo_mp.models.mapping import Param, Rule, expand
from grpo_mp.platform import gc_frozen
from grpo_mp.weight_sync.plan import Bucket, Transfer, plan_sync

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
WHOLE = [dict.fromkeys(PARAMS, 0)]  # one rank with every parameter
ITEMSIZE = {name: 4 if param.keep_float32 else 2 for name, param in PARAMS.items()}
LARGEST_ATOM = 2 * (8 * 4 + 4 * 4) + 4 * 4 + 2 * 4  # bytes of a layer without its experts
LAYOUTS = [
    (world_size, LayoutConfig(tensor=tensor, pipeline=pipeline, expert=expert, expert_tensor=expert_tensor))
    for world_size in (1, 2, 4, 8)
    for tensor, pipeline, expert, expert_tensor in product((1, 2), (1, 2), (1, 2, 4), (1, 2))
    if world_size % (tensor * pipeline) == 0 == world_size % (expert * expert_tensor * pipeline)
]


def parts_by_rank(world_size: int, layout: LayoutConfig) -> list[dict[str, int]]:
    """Return each rank's parts: layers by stage, experts by expert rank, split tensors by tensor rank."""
    parts: list[dict[str, int]] = [{} for _ in range(world_size)]
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
        parts[rank][name] = part if param.tp_dim is not None else 0
    return parts


def atom(param: Param) -> object:
    return (param.layer, param.expert) if param.layer is not None else param.name


def nbytes(names: Iterable[str]) -> int:
    """Return the bytes of parameters: all their shapes at 2 bytes an element, 4 for what is kept in float32."""
    params = [PARAMS[name] for name in names]
    return sum(prod(shape) * (4 if param.keep_float32 else 2) for param in params for shape in param.shapes)


def check(
    buckets: Sequence[Bucket], parts_of: Sequence[Mapping[str, int]], targets: Sequence[int], bucket_bytes: int
) -> None:
    holders = {(name, part, rank) for rank, local in enumerate(parts_of) for name, part in local.items()}
    ranks = {rank for _, _, rank in holders}
    parts = {(name, part) for name, part, _ in holders}
    assert Counter(name for bucket in buckets for name in bucket.names) == Counter(list(PARAMS))
    transfers = [transfer for bucket in buckets for transfer in bucket.transfers]
    received = Counter((transfer.name, transfer.part, transfer.target) for transfer in transfers)
    assert received == Counter((name, part, target) for name, part in parts for target in targets)
    bucket_of = {name: number for number, bucket in enumerate(buckets) for name in bucket.names}
    for param, other in combinations(PARAMS.values(), 2):
        assert atom(param) != atom(other) or bucket_of[param.name] == bucket_of[other.name]
    for bucket in buckets:
        assert nbytes(bucket.names) <= bucket_bytes or len({atom(PARAMS[name]) for name in bucket.names}) == 1
        for transfer in bucket.transfers:
            shard = (transfer.name, transfer.part)
            assert transfer.name in bucket.names
            assert (*shard, transfer.source) in holders
            assert transfer.source == transfer.target or (*shard, transfer.target) not in holders
            assert transfer.source in ranks


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
def test_every_layout_target_set_and_bucket_size(world_size: int, layout: LayoutConfig) -> None:
    parts = parts_by_rank(world_size, layout)
    ranks = range(world_size)
    target_sets = [(0,), tuple(ranks), tuple(ranks[::2]), (world_size - 1,), ()]
    for targets, bucket_bytes in product(target_sets, (1, LARGEST_ATOM, 10**6)):
        check(plan_sync(PARAMS, parts, targets, bucket_bytes, ITEMSIZE), parts, targets, bucket_bytes)


def test_buckets_are_filled_in_order_and_a_large_atom_gets_its_own() -> None:
    assert len(plan_sync(PARAMS, WHOLE, (0,), 10**6, ITEMSIZE)) == 1
    by_atom = plan_sync(PARAMS, WHOLE, (0,), 1, ITEMSIZE)
    assert len(by_atom) == len({atom(param) for param in PARAMS.values()}) == 3 + 2 + 2 * EXPERTS
    two_experts = 2 * (12 * 4 + 4 * 12) * 2
    buckets = plan_sync(PARAMS, WHOLE, (0,), two_experts, ITEMSIZE)
    assert max(nbytes(bucket.names) for bucket in buckets) == two_experts
    assert all(nbytes(bucket.names + following.names) > two_experts for bucket, following in pairwise(buckets))


def test_replicas_share_the_load_and_holders_use_their_own_shards() -> None:
    targets = (0, 2, 3, 4, 5)
    transfers = plan_sync(PARAMS, WHOLE * 2, targets, 10**6, ITEMSIZE)[0].transfers
    sources = {target: {transfer.source for transfer in transfers if transfer.target == target} for target in targets}
    assert sources == {0: {0}, 2: {1}, 3: {0}, 4: {1}, 5: {0}}


def test_parameter_without_holder_or_with_missing_part_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rank holds norm"):
        plan_sync(PARAMS, [{name: 0 for name in PARAMS if name != "norm"}], (0,), 10, ITEMSIZE)
    incomplete = [WHOLE[0] | {"embedding": 2}]
    with pytest.raises(ValueError, match=r"embedding: parts \[2\] are held, one is missing"):
        plan_sync(PARAMS, incomplete, (0,), 10, ITEMSIZE)


def test_transfers_are_small_and_excluded_from_garbage_collection() -> None:
    tracemalloc.start()
    transfers = [Transfer("decoder.layers.3.mlp.experts.17", 0, 3, 5) for _ in range(10_000)]
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size / len(transfers) < 100
    with gc_frozen():
        assert gc.get_freeze_count() >= len(transfers)
        assert not {id(item) for item in gc.get_objects()} & {id(transfer) for transfer in transfers}
    assert gc.get_freeze_count() == 0
