"""Plans of trainer and engine layouts, replayed with real tensors: ranks load what they keep, bit for bit.

The order of a sync: what is sent, packed and loaded at the same time.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.coordinates import coordinates, tensor_part, tp_size
from grpo_mp.models.families import FAMILIES
from grpo_mp.models.fp8 import SCALE, quantize
from grpo_mp.models.hf_config import INT4 as INT4_GROUPS
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param
from grpo_mp.models.weight_formats import BLOCKWISE_FP8, INT4, MXFP8, WeightFormat
from grpo_mp.rollout.engine_layout import EngineParallelism
from grpo_mp.rollout.shared_memory import NamedTensors
from grpo_mp.weight_sync.plan import (
    WHOLE,
    Piece,
    Shard,
    SyncPlan,
    engine_readers,
    find_holders,
    group_params,
    plan_sync,
)
from grpo_mp.weight_sync.reshard import Resharder
from grpo_mp.weight_sync.transport import EngineLink
from grpo_mp.weight_sync.update import WeightSync
from grpo_mp.weight_sync.wire import WireFormat
from tests.models.test_mapping import megatron_shard
from tests.shard_holders import shard_holders
from tools.tiny.models import TINY_CONFIGS

EXPERTS = 4
SMALL = {"num_hidden_layers": 3, "hidden_size": 32, "vocab_size": 70, "intermediate_size": 64, "num_key_value_heads": 4}
SMALL_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
# FP8 has blocks of 128: of 768 rows halves and thirds are whole blocks, of 384 halves cut one.
WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 512, "kv_lora_rank": 128}
SIXTHS = {"hidden_size": 48, "intermediate_size": 96, "moe_intermediate_size": 48, "num_attention_heads": 6}
SIXTHS |= {"num_key_value_heads": 6}
SHAPES: dict[str, dict[str, Any]] = {
    "small": {},
    "wide": WIDE,
    "sixths": SIXTHS,
    "thirds of blocks": SIXTHS | {"hidden_size": 256, "moe_intermediate_size": 768, "intermediate_size": 768},
    "halves cut blocks": SIXTHS | {"hidden_size": 256, "moe_intermediate_size": 384, "intermediate_size": 384},
    "halves cut groups": SIXTHS | {"hidden_size": 64, "moe_intermediate_size": 96, "intermediate_size": 96},
}
FAMILY_SHAPES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1},
    "qwen3_moe": {"num_experts": EXPERTS},
    "glm4_moe": {"n_routed_experts": EXPERTS},
    "llama": {},
}
# Of experts: the trainer's parts, the engines' slices, and whether they are quantized before they are sent.
OVERLAPPING = {
    "sixths": {(2, 3, False), (3, 2, False)},
    "thirds of blocks": {(2, 3, True), (3, 2, True)},
    "halves cut blocks": {(2, 3, False), (6, 3, False), (3, 3, True)},
    "halves cut groups": {(2, 3, False), (6, 3, False), (3, 3, True)},
}
STAGES = {1: ((0, 1, 2),), 2: ((0, 1), (2,)), 3: ((0,), (1,), (2,))}  # uneven for two


@dataclass(frozen=True)
class Case:
    """A trainer's layout and the engines that its weights go to."""

    family: str
    world_size: int
    ranks_per_node: int
    layout: LayoutConfig
    engines: int
    parallelism: EngineParallelism
    form: WeightFormat | None = None
    round_bytes: int = 20_000
    shape: str = "small"

    @property
    def host_ranks(self) -> list[int]:
        return [engine * self.parallelism.gpus for engine in range(self.engines)]


def trainer_layouts(world_size: int, experts: bool) -> Iterator[LayoutConfig]:
    for tensor, pipeline, expert, expert_tensor in product((1, 2, 4), (1, 2, 3), (1, 2, 4), (1, 2)):
        if not experts and expert * expert_tensor > 1:
            continue
        if world_size % (tensor * pipeline) == 0 == world_size % (expert * expert_tensor * pipeline):
            yield LayoutConfig(tensor=tensor, pipeline=pipeline, expert=expert, expert_tensor=expert_tensor)


def engine_sets(world_size: int, ranks_per_node: int, experts: bool) -> Iterator[tuple[int, EngineParallelism]]:
    """Engines of every size, inside a node or over several; with all ranks or not; experts by expert and by tensor."""
    for gpus, expert, all_ranks in product((1, 2, 4, 8), (1, 2, 4), (True, False)):
        divides = max(gpus, ranks_per_node) % min(gpus, ranks_per_node) == 0
        engines = world_size // gpus if all_ranks else 1
        if not divides or gpus > world_size or gpus % expert or (expert > 1 and not experts):
            continue
        if all_ranks or world_size // gpus > 1:
            yield engines, EngineParallelism(gpus, 1, expert, gpus, gpus, EXPERTS if experts else 0)


def all_cases() -> list[Case]:
    cases = []
    for world_size, ranks_per_node in ((1, 1), (2, 2), (2, 1), (4, 4), (4, 2), (6, 2), (8, 8), (8, 4), (12, 4)):
        for layout in trainer_layouts(world_size, experts=True):
            for engines, parallelism in engine_sets(world_size, ranks_per_node, experts=True):
                family = ("deepseek_v3", "qwen3_moe", "glm4_moe")[len(cases) % 3]
                cases.append(Case(family, world_size, ranks_per_node, layout, engines, parallelism))
    for layout in trainer_layouts(4, experts=False):
        for engines, parallelism in engine_sets(4, 2, experts=False):
            cases.append(Case("llama", 4, 2, layout, engines, parallelism))
    return cases


def low_precision_cases(form: WeightFormat) -> list[Case]:
    """Of FP8, tensor parallelism 2 leaves whole blocks of most matrices, 4 cuts some."""
    layouts = (LayoutConfig(expert=4), LayoutConfig(tensor=2, expert_tensor=2), LayoutConfig(tensor=4, expert_tensor=4))
    engines = (
        (4, EngineParallelism(1, 1, 1, 1, 1, EXPERTS)),
        (1, EngineParallelism(4, 1, 4, 4, 4, EXPERTS)),
        (2, EngineParallelism(2, 1, 1, 2, 2, EXPERTS)),  # slices of 128, whole blocks
        (1, EngineParallelism(4, 1, 1, 4, 4, EXPERTS)),  # of 64: each rank gets whole experts
    )
    families = ("deepseek_v3", "qwen3_moe") if form == BLOCKWISE_FP8 else ("qwen3_moe",)
    return [
        Case(family, 4, 2, layout, *engine, form=form, round_bytes=200_000, shape="wide")
        for family, layout, engine in product(families, layouts, engines)
    ]


def overlapping_cases(shape: str, form: WeightFormat | None) -> list[Case]:
    """Two or six parts on the trainer's side, three slices on the engines', and the other way."""
    layouts = [LayoutConfig(tensor=tensor, expert_tensor=tensor) for tensor in (2, 3, 6)]
    layouts.append(LayoutConfig(tensor=2, expert=2, expert_tensor=3))
    engines = [(6 // gpus, EngineParallelism(gpus, 1, 1, gpus, gpus, EXPERTS)) for gpus in (2, 3, 6)]
    engines.append((1, EngineParallelism(6, 1, 2, 6, 6, EXPERTS)))
    families = ("qwen3_moe",) if form else ("deepseek_v3", "qwen3_moe")
    return [
        Case(family, 6, 6, layout, *engine, form, 2_000_000 if form else 50_000, shape)
        for family, layout, engine in product(families, layouts, engines)
    ]


@cache
def model(family: str, shape: str) -> tuple[dict[str, Param], dict[str, Tensor]]:
    """The parameters of a family and random Hugging Face tensors of them."""
    values = TINY_CONFIGS[family] | SMALL | FAMILY_SHAPES[family] | {"model_type": family}
    values |= SMALL_EXPERTS if family != "llama" else {}
    values |= SHAPES[shape] | {"architectures": [FAMILIES[family].architecture]}
    params = FAMILIES[family].params(HfConfig(Path("model"), values))
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for param in params.values():
        for name, shape in zip(param.hf, param.shapes, strict=True):
            dtype = torch.float32 if param.keep_float32 else torch.bfloat16
            tensors[name] = torch.randn(shape, generator=generator).to(dtype)
    return params, tensors


def shards_by_rank(case: Case) -> list[dict[str, int]]:
    """Return each rank's parts: layers by stage, experts by expert rank, split tensors by tensor rank."""
    parts: list[dict[str, int]] = [{} for _ in range(case.world_size)]
    for rank, (name, param) in product(range(case.world_size), model(case.family, case.shape)[0].items()):
        coords = coordinates(rank, case.layout, case.world_size)
        if param.layer is not None:
            here = param.layer in STAGES[case.layout.pipeline][coords.pipeline]
        else:
            here = coords.pipeline == (0 if "embedding" in name else case.layout.pipeline - 1)
        per_rank = EXPERTS // case.layout.expert
        if here and (param.expert is None or param.expert // per_rank == coords.expert):
            parts[rank][name] = tensor_part(param, coords)
    return parts


def wire_format(case: Case) -> WireFormat:
    params, _ = model(case.family, case.shape)
    sizes = {name: tp_size(param, case.layout) for name, param in params.items()}
    return WireFormat(params, sizes, torch.bfloat16, case.form)


def plan_of(case: Case) -> SyncPlan:
    wire = wire_format(case)
    return plan_sync(
        group_params(wire.params),
        find_holders(wire.params, shards_by_rank(case), wire.parts),
        engine_readers(case.host_ranks, case.parallelism, max(case.form.block) if case.form else 1),
        case.ranks_per_node,
        wire.sizes,
        case.round_bytes,
    )


def resharders(case: Case, plan: SyncPlan) -> list[Resharder]:
    """Every rank's, with the shards that the layout gives it."""
    wire = wire_format(case)
    (params, tensors) = model(case.family, case.shape)
    made: dict[tuple[str, int], Tensor] = {}

    def shard(name: str, part: int) -> Tensor:
        if (name, part) not in made:
            made[name, part] = megatron_shard(
                params[name], [tensors[hf] for hf in params[name].hf], wire.parts(name), part
            )
        return made[name, part]

    return [
        Resharder(plan.of_rank(rank), wire, {name: shard(name, part) for name, part in held.items()})
        for rank, held in enumerate(shards_by_rank(case))
    ]


def replay(case: Case, ranks: Sequence[Resharder]) -> list[dict[str, Tensor]]:
    """What each rank's engine loads: all messages are passed on in this process."""
    loaded: list[dict[str, Tensor]] = [{} for _ in ranks]
    for number in range(len(ranks[0].rounds)):
        rounds = [rank.rounds[number] for rank in ranks]
        sent = [rank.messages(round_) for rank, round_ in zip(ranks, rounds, strict=True)]
        staged = []
        for rank, (resharder, round_) in enumerate(zip(ranks, rounds, strict=True)):
            assert {source for source, messages in enumerate(sent) if rank in messages} == round_.receives.keys()
            assert sum(message.numel() for message in sent[rank].values()) == resharder.sent_bytes(round_)
            staged.append(dict(resharder.join(round_, {source: sent[source][rank] for source in round_.receives})))
        for rank, round_ in enumerate(rounds):
            for receiver, pieces in round_.loads.items():
                assert receiver // case.ranks_per_node == rank // case.ranks_per_node
                shares = {key: shared for key, shared in round_.shares.items() if key[0] == receiver}
                assert all(rounds[receiver].shares[key] == shared for key, shared in shares.items())
                assert receiver == rank or sorted(chain(*shares.values())) == sorted(pieces)
                for spec in ranks[rank].wire.all_specs(pieces):
                    assert spec.name not in loaded[rank], "loaded twice"
                    loaded[rank][spec.name] = staged[receiver][spec.name]
    return loaded


def expected(case: Case, rank: int) -> dict[str, Tensor]:
    """What an engine keeps on a rank, by SGLang's rule: experts in order, over groups of ranks next to each other,

    each divided over the ranks of its group, rows of gate and up, columns of down.
    """
    params, tensors = model(case.family, case.shape)
    gpus = case.parallelism.gpus
    expert_parallel = case.parallelism.expert
    if rank >= case.engines * gpus:
        return {}
    group, place = divmod(rank % gpus, gpus // expert_parallel)
    kept = {}
    for param in params.values():
        mine = param.expert is None or param.expert in range(
            group * EXPERTS // expert_parallel, (group + 1) * EXPERTS // expert_parallel
        )
        for name in param.hf if mine and not param.alias else ():
            found = {name: tensors[name]}
            if case.form and case.form.quantized(param)[param.hf.index(name)]:
                found = REFERENCES[case.form.name](name, tensors[name])
            if param.expert is not None and slices(case):
                found = {
                    n: t if n.endswith("_shape") else t.chunk(gpus // expert_parallel, int("down" in n))[place]
                    for n, t in found.items()
                }
            kept |= found
    return kept


def slices(case: Case) -> bool:
    """Whether each rank's slice of an expert can be sent: in a low precision of whole blocks alone."""
    size = expert_rows(case) * case.parallelism.expert // case.parallelism.gpus
    return not case.form or size % max(case.form.block) == 0


def fp8_reference(name: str, weight: Tensor) -> dict[str, Tensor]:
    values, scale = quantize(weight)
    return {name: values, name + SCALE: scale}


def mxfp8_reference(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Block by block in float64: the least power of two with which no value exceeds 448."""
    blocks = weight.double().unflatten(1, (-1, 32))
    exponents = torch.log2(blocks.abs().amax(2) / 448).ceil()
    values = (blocks / torch.exp2(exponents)[:, :, None]).flatten(1).to(torch.float8_e4m3fn)
    return {name: values, name + SCALE: (exponents + 127).to(torch.uint8)}


def int4_reference(name: str, weight: Tensor) -> dict[str, Tensor]:
    """As the compressed-tensors library compresses the whole weight."""
    scale = weight.unflatten(1, (-1, 32)).abs().amax(2) / 7.5
    scheme = QuantizationScheme(targets=["Linear"], weights=INT4_GROUPS)
    stored = PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    return {name.removesuffix("weight") + part: tensor for part, tensor in stored.items()}


REFERENCES = {"fp8": fp8_reference, "mxfp8": mxfp8_reference, "compressed-tensors": int4_reference}


def expert_rows(case: Case) -> int:
    return int((SMALL_EXPERTS | SHAPES[case.shape])["moe_intermediate_size"])


def check(case: Case) -> None:
    plan = plan_of(case)
    loaded = replay(case, resharders(case, plan))
    for rank, tensors in enumerate(loaded):
        kept = expected(case, rank)
        assert tensors.keys() == kept.keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == kept[name].dtype
            assert tensor.shape == kept[name].shape
            assert torch.equal(tensor.contiguous().view(torch.uint8), kept[name].contiguous().view(torch.uint8)), name
    check_economy(case, plan)


def check_economy(case: Case, plan: SyncPlan) -> None:
    """Each node gets a group once; no shard is sent that is there; no round is larger than it may be."""
    sizes = wire_format(case).sizes
    shards = shards_by_rank(case)
    arrivals: Counter[tuple[Piece, int]] = Counter()
    for transfers in plan.rounds:
        uses: Counter[tuple[str, int]] = Counter()
        parts: Counter[tuple[str, int]] = Counter()
        largest = 0
        for transfer in transfers:
            node = transfer.receiver // case.ranks_per_node
            arrivals.update((piece, node) for piece in transfer.pieces())
            size = sum(map(sizes.staged, transfer.pieces()))
            arrives = sum(sizes.sent(shard) for source, shard in transfer.shards() if source != transfer.receiver)
            largest = max(largest, size, arrives)
            for reader in transfer.readers:
                uses["loads", reader] += size
                parts["loads", reader] += 1
            senders: set[tuple[str, int]] = set()
            for source, shard in transfer.shards():
                assert shards[source][shard.name] == shard.part
                near = any(
                    held.get(shard.name) == shard.part
                    for rank, held in enumerate(shards)
                    if rank // case.ranks_per_node == node
                )
                assert (source // case.ranks_per_node == node) == near, "sent over the network though it is there"
                if source != transfer.receiver:
                    assert shards[transfer.receiver].get(shard.name) != shard.part
                    uses["sends", source] += sizes.sent(shard)
                    uses["receives", transfer.receiver] += sizes.sent(shard)
                    senders |= {("sends", source), ("receives", transfer.receiver)}
            parts.update(senders)
        for (kind, rank), size in uses.items():
            alone = (kind == "sends" and size <= largest) or parts[kind, rank] == 1
            assert size <= case.round_bytes or alone
    assert set(arrivals.values()) <= {1}


@pytest.mark.parametrize("of_large", [7, pytest.param(1, marks=pytest.mark.nightly)], ids=["a seventh", "all"])
def test_every_pair_of_layouts_brings_what_each_engine_rank_keeps(of_large: int) -> None:
    """On up to six ranks; on eight and twelve one of so many, among them each layout and each set of engines."""
    small = [case for case in all_cases() if case.world_size <= 6]
    large = [case for case in all_cases() if case.world_size > 6]
    cases = [*small, *large[::of_large]]
    assert len(cases) >= 500
    for part in ("layout", "parallelism", "family"):
        assert {str(vars(case)[part]) for case in cases} == {str(vars(case)[part]) for case in all_cases()}
    for case in cases:
        check(case)


@pytest.mark.parametrize("form", [BLOCKWISE_FP8, MXFP8, INT4], ids=lambda form: form.name)
def test_weights_are_quantized_at_the_source_bit_for_bit(form: WeightFormat) -> None:
    for case in low_precision_cases(form):
        check(case)
        wire = wire_format(case)
        experts = [name for name, param in wire.params.items() if param.expert is not None]
        at_source = {wire.quantizes_shards(name) for name in experts}
        assert at_source == {case.layout.expert_tensor < 4 or form != BLOCKWISE_FP8}  # 256 over four are half blocks


@pytest.mark.parametrize(
    ("shape", "form"),
    [
        ("sixths", None),
        ("thirds of blocks", BLOCKWISE_FP8),
        ("halves cut blocks", BLOCKWISE_FP8),
        ("halves cut groups", INT4),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_parts_and_slices_of_which_none_is_whole_others(shape: str, form: WeightFormat | None) -> None:
    """Experts; of other weights, which travel whole, two, three and six parts are joined."""
    sent = set()
    pairs = OVERLAPPING[shape]
    for case in overlapping_cases(shape, form):
        check(case)
        wire = wire_format(case)
        for transfer in chain(*plan_of(case).rounds):
            for name in transfer.names if transfer.slice != WHOLE else ():
                sent.add((wire.parts(name), transfer.slice.total, wire.quantizes_shards(name)))
    assert pairs <= sent


def test_experts_that_the_engine_moves_go_to_all_its_ranks() -> None:
    """And whole: with `moe_dp_size` fewer ranks divide one than `ep_size` leaves."""
    case = next(case for case in all_cases() if 1 < case.parallelism.expert < case.parallelism.gpus)
    readers = engine_readers(case.host_ranks, replace(case.parallelism, moves_experts=True))
    (last,) = [group for group in group_params(model(case.family, case.shape)[0]) if group.expert == 3][-1:]
    assert {slice_: sorted(ranks) for slice_, ranks in readers(last).items()} == {
        WHOLE: list(range(case.engines * case.parallelism.gpus))
    }


def test_holders_by_layout_are_those_that_the_ranks_report() -> None:
    """The planner reckons with the first, a run plans with the second."""
    for case in all_cases():
        params = {name: param for name, param in model(case.family, case.shape)[0].items() if not param.alias}
        reckoned = shard_holders(params, case.layout, case.world_size, STAGES[case.layout.pipeline])
        assert reckoned == find_holders(params, shards_by_rank(case), wire_format(case).parts)


def test_a_round_is_exchanged_while_the_engine_loads_the_one_before() -> None:
    calls: list[str] = []

    def stages(rounds: Sequence[int]) -> Iterator[NamedTensors]:
        for number in rounds:
            calls.append(f"exchanged {number}")
            yield []

    @contextmanager
    def loading(round_: int, _: NamedTensors) -> Iterator[None]:
        calls.append(f"loading {round_}")
        yield
        calls.append(f"loaded {round_}")

    resharder = SimpleNamespace(rounds=(0, 1, 2), stages=stages, sent_bytes=lambda _: 0)
    link = SimpleNamespace(
        begin=lambda: None, end=lambda _: None, loading=loading, rollout=SimpleNamespace(client=None)
    )
    WeightSync(cast(Resharder, resharder), cast(EngineLink, link)).update_weights(1)
    assert calls == [
        "exchanged 0",
        *("loading 0", "exchanged 1", "loaded 0"),
        *("loading 1", "exchanged 2", "loaded 1"),
        *("loading 2", "loaded 2"),
    ]


def test_a_shard_that_several_ranks_are_sent_is_quantized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks of two nodes with a part each: the one of each node that joins a matrix gets every part."""
    made: list[Shard] = []
    convert = WireFormat.shard_tensors

    def converted(wire: WireFormat, shard: Shard, tensor: Tensor) -> list[Tensor]:
        made.append(shard)
        return convert(wire, shard, tensor)

    monkeypatch.setattr(WireFormat, "shard_tensors", converted)
    layout = LayoutConfig(tensor=4, expert_tensor=4)
    engine = EngineParallelism(1, 1, 1, 1, 1, EXPERTS)
    case = Case("qwen3_moe", 4, 2, layout, 4, engine, form=BLOCKWISE_FP8, round_bytes=200_000, shape="wide")
    sent: list[Shard] = []
    for resharder in resharders(case, plan_of(case)):
        for round_ in resharder.rounds:
            resharder.messages(round_)
            sent += chain(*map(set, round_.sends.values()))
            assert Counter(made) == Counter(set(chain(*round_.sends.values())))
            made.clear()
    assert len(sent) > len(set(sent))
