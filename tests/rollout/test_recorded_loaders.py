"""What a plan brings to each rank of an engine is what SGLang's own loaders keep there, for every family."""

import json
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mp.models.families import FAMILIES, family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.planner.model_configs import published_config
from grpo_mp.rollout.engine_layout import engine_format, engine_parallelism, expert_alignment
from grpo_mp.weight_sync.plan import Piece, Readers, engine_readers, group_params, plan_sync
from grpo_mp.weight_sync.wire import WireFormat
from tests.planner.jobs import settings_of
from tests.rollout.record_loaders import Copied
from tests.rollout.test_start_on_meta import cuda_arguments, run_module
from tools.tiny.models import PUBLISHED_KEYS, TINY_CONFIGS

pytestmark = pytest.mark.slow
LAYERS = 4  # of published models: three dense ones and a mixture of the largest
FP8, MXFP8, INT4 = ({"quantization": name} for name in ("fp8", "mxfp8", "compressed-tensors"))
H100 = 9.0  # compute capability
# model, engine.gpus_per_engine, engine.args, ranks
CASES: list[tuple[str, int, dict[str, Any], tuple[int, ...]]] = [
    ("deepseek-r1", 16, {"ep_size": 16, "attn_dp_size": 2, **FP8}, (0, 9)),
    ("deepseek-r1", 64, {"ep_size": 64, "attn_dp_size": 8, "moe_a2a_backend": "deepep", "moe_dense_tp_size": 1}, (63,)),
    ("deepseek-r1", 16, {}, (5,)),
    ("deepseek-v3.2", 16, {"ep_size": 16, "attn_dp_size": 2, **FP8}, (9,)),
    ("glm-5", 16, {"ep_size": 16, **FP8}, (5,)),
    ("glm-5", 8, {"ep_size": 8}, (3,)),
    ("kimi-k2", 32, {"ep_size": 8}, (31,)),
    ("deepseek-v2-lite", 2, {"ep_size": 2}, (1,)),
    ("glm-4.5", 8, {"ep_size": 4}, (5,)),
    ("glm-4.7-flash", 4, {"ep_size": 2}, (3,)),
    ("minimax-m2", 8, {"ep_size": 4}, (5,)),
    ("hy3-preview", 8, {"ep_size": 4}, (5,)),
    ("qwen3-30b-a3b", 8, {"ep_size": 8, **FP8}, (6,)),
    ("qwen3-30b-a3b", 8, {}, (5,)),  # 96 rows each
    ("qwen3-235b-a22b", 16, {"ep_size": 8, "attn_dp_size": 4}, (11,)),
    ("qwen3-next-80b-a3b", 4, {"ep_size": 4}, (2,)),
    ("qwen3-next-80b-a3b", 4, {"ep_size": 4, **FP8}, (3,)),
    ("qwen3.5-35b-a3b", 4, {"ep_size": 4}, (1,)),
    ("qwen3.5-35b-a3b", 2, FP8, (1,)),
    ("qwen3.8-27b", 4, FP8, (1,)),
    ("glm-4.5", 4, {"ep_size": 4, **FP8}, (3,)),
    ("minimax-m2", 8, {"ep_size": 8, **FP8}, (5,)),
    ("hy3-preview", 4, {"ep_size": 4, **FP8}, (3,)),
    ("qwen3-30b-a3b", 8, {"ep_size": 8, **MXFP8}, (6,)),
    ("qwen3-30b-a3b", 8, INT4, (5,)),
    ("kimi-k2", 32, {"ep_size": 8, **INT4}, (31,)),
    ("qwen3.5-35b-a3b", 4, {"ep_size": 4, **INT4}, (1,)),
    ("glm-4.5", 4, {"ep_size": 2, **INT4}, (3,)),
    ("qwen3.8-27b", 4, {}, (3,)),
    ("mixtral-8x22b", 8, {"ep_size": 4}, (3,)),
    ("qwen3-8b", 4, {}, (2,)),
    ("qwen2.5-7b", 4, {}, (3,)),
    ("llama-3.2-1b", 8, {}, (6,)),
    ("gpt-oss-20b", 4, {}, (1,)),
    ("gpt-oss-20b", 4, {"ep_size": 2}, (2,)),
]
IDS = [
    f"{model}-{gpus}-{'-'.join(f'{name}={value}' for name, value in args.items())}" for model, gpus, args, _ in CASES
]


def small(model: str) -> HfConfig:
    hf = published_config(model)
    return replace(hf, values=dict(hf.values) | {"num_hidden_layers": min(LAYERS, hf.int("num_hidden_layers"))})


def wire_format(hf: HfConfig, args: dict[str, Any]) -> WireFormat:
    params = family_of(hf).params(hf)
    return WireFormat(params, dict.fromkeys(params, 1), torch.bfloat16, engine_format(args, hf, cpu=False))


def readers_of(case: int) -> Readers:
    model, gpus, args, _ = CASES[case]
    hf = small(model)
    parallelism = engine_parallelism(gpus, args, hf)
    form = wire_format(hf, args).format
    return engine_readers((0,), parallelism, expert_alignment(parallelism, args, form, H100))


def pieces(case: int, rank: int) -> tuple[list[Piece], list[Piece]]:
    """Return what the plan brings to a rank, and all else."""
    readers = readers_of(case)
    brought = []
    others = []
    for group in group_params(wire_format(small(CASES[case][0]), CASES[case][2]).params):
        mine = [slice_ for slice_, ranks in readers(group).items() if rank in ranks]
        brought += [Piece(name, slice_) for slice_ in mine for name in group.names]
        others += [Piece(name) for name in group.names if not mine]
    return brought, others


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Copied]:
    """What is copied of each tensor, of each case and rank; of a slice the loaders get its view of the full shape."""
    folder = tmp_path_factory.mktemp("models")
    cases = {}
    for case, (model, gpus, args, ranks) in enumerate(CASES):
        hf = small(model)
        arguments = cuda_arguments(settings_of(engine={"gpus_per_engine": gpus, "args": args}), hf, folder / IDS[case])
        for rank in ranks:
            specs = wire_format(hf, args).all_specs(chain(*pieces(case, rank)))
            tensors = {s.name: [str(s.dtype).removeprefix("torch."), s.full_shape, s.stride] for s in specs}
            cases[f"{IDS[case]} {rank}"] = {"arguments": arguments, "rank": rank, "tensors": tensors}
    facts: dict[str, Copied] = run_module("record_loaders", cases)
    return facts


EACH_RANK = pytest.mark.parametrize(
    ("case", "rank"), [(case, rank) for case, (*_, ranks) in enumerate(CASES) for rank in ranks], ids=str
)


@EACH_RANK
def test_the_plan_brings_what_the_loaders_keep(recorded: dict[str, Copied], case: int, rank: int) -> None:
    """Of a slice they read all, and nothing of what lies around it, except of INT4, which SGLang transposes first."""
    model, gpus, args, _ = CASES[case]
    hf = small(model)
    kept = recorded[f"{IDS[case]} {rank}"]
    assert "error" not in kept, kept["error"]
    wire = wire_format(hf, args)
    parallelism = engine_parallelism(gpus, args, hf)
    brought, _ = pieces(case, rank)
    assert {spec.name for spec in wire.all_specs(brought)} == kept.keys()
    experts = [piece for piece in brought if wire.params[piece.name].expert is not None]
    assert len(experts) * parallelism.expert == sum(param.expert is not None for param in wire.params.values())
    whole = {name for piece in experts if (param := wire.params[piece.name]).tp_dim is None for name in param.hf}
    for spec in wire.all_specs(experts):
        first = spec.margins[0] // spec.dtype.itemsize
        elements = prod(spec.shape)
        last = first + elements - 1
        if args.get("quantization") == INT4["quantization"]:
            steps = zip(spec.full_shape, spec.stride, strict=True)
            first = 0
            last = sum((size - 1) * stride for size, stride in steps)
        assert kept[spec.name] == [elements, first, last]
        divides = spec.name not in whole and not spec.name.endswith("_shape")
        assert (spec.sliced or (0, 0, 1))[2] == (parallelism.expert_tensor if divides else 1)


@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
def test_a_rank_receives_little_more_than_its_engine_keeps(recorded: dict[str, Copied], case: int) -> None:
    """Within 1.05 of the experts' bytes that stock loaders keep; of all else a node receives every tensor once."""
    model, gpus, args, ranks = CASES[case]
    wire = wire_format(small(model), args)
    holders = {name: {0: (gpus,)} for name, param in wire.params.items() if not param.alias}  # a rank beside the engine
    experts = {name for name in holders if wire.params[name].expert is not None}
    plan = plan_sync(group_params(wire.params), holders, readers_of(case), 8, wire.sizes, 2**30)
    received = dict.fromkeys(range(gpus), 0)
    others = dict.fromkeys(range(-(-gpus // 8)), 0)
    for transfer in chain(*plan.rounds):
        size = sum(wire.sizes.sent(shard) for _, shard in transfer.shards())
        if transfer.names[0] not in experts:
            others[transfer.receiver // 8] += size
            continue
        for reader in transfer.readers:  # from the sender or from the receiver
            received[reader] += size
    itemsize = {spec.name: spec.dtype.itemsize for spec in wire.all_specs(map(Piece, experts))}
    for rank in ranks:
        kept = recorded[f"{IDS[case]} {rank}"]
        assert received[rank] <= 1.05 * sum(kept[name][0] * itemsize[name] for name in kept.keys() & itemsize.keys())
    rest = wire.all_specs(Piece(name) for name in holders.keys() - experts)
    assert max(others.values()) <= 1.05 * sum(prod(spec.shape) * spec.dtype.itemsize for spec in rest)


def test_the_text_model_of_kimi_k2_5_is_covered_once_by_what_is_sent(tmp_path: Path) -> None:
    """Names with the prefix of the published files; SGLang's class for the whole model, on one rank."""
    text = TINY_CONFIGS["kimi_k2"] | PUBLISHED_KEYS["kimi_k2"] | {"architectures": ["DeepseekV3ForCausalLM"]}
    text |= {"vocab_size": 192, "num_hidden_layers": 2, "max_position_embeddings": 8192}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64}
    tower = {"patch_size": 14} | sizes | {f"vt_{name}": size for name, size in sizes.items()}
    values = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
    (tmp_path / "config.json").write_text(json.dumps(values | {"text_config": text, "vision_config": tower}))
    hf = HfConfig.read(tmp_path)
    cases = {}
    for name, args in {"wide": {}, "INT4": INT4}.items():
        folder = tmp_path / name
        arguments = cuda_arguments(settings_of(engine={"args": args}), hf, folder)
        (folder / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
        wire = wire_format(hf, args)
        specs = wire.all_specs(Piece(name) for name, param in wire.params.items() if not param.alias)
        assert all(spec.name.startswith("language_model.") for spec in specs)
        tensors = {spec.name: [str(spec.dtype).removeprefix("torch."), spec.shape] for spec in specs}
        cases[name] = {"arguments": arguments, "tensors": tensors}
    for name, counts in run_module("covered_parameters", cases).items():
        assert "error" not in counts, counts["error"]
        of_text = {one: count for one, count in counts.items() if one.startswith("language_model.")}
        assert len(of_text) > 20
        # SGLang makes the indices of INT4 itself, and keeps one shape for gate and up.
        made = {one for one in of_text if one.endswith(("_g_idx", "_g_idx_sort_indices", "13_weight_shape"))}
        assert bool(made) == (name == "INT4")
        assert {one: count for one, count in of_text.items() if count[0] != count[1]}.keys() <= made
        assert not any(count[0] for one, count in counts.items() if one not in of_text)


def test_every_family_is_recorded() -> None:
    recorded = {family_of(small(model)).architecture for model, *_ in CASES}
    assert recorded == {family.architecture for family in FAMILIES.values()}
