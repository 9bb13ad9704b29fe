"""What a plan brings to each rank of an engine is what SGLang's own loaders keep there, for every family."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mp.models.families import FAMILIES, family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.planner.model_configs import published_config
from grpo_mp.rollout.engine_args import ENGINE_SITE
from grpo_mp.rollout.engine_parallelism import engine_parallelism, expert_alignment
from grpo_mp.rollout.precision import engine_uses_fp8
from grpo_mp.weight_sync.plan import Piece, engine_readers, group_params
from grpo_mp.weight_sync.wire import WireFormat
from tests.planner.jobs import settings_of
from tests.rollout.record_loaders import Copied
from tests.rollout.test_start_on_meta import cuda_arguments

pytestmark = pytest.mark.slow
LAYERS = 4  # of published models: three dense ones and a mixture of the largest
FP8 = {"quantization": "fp8"}
# model, engine.gpus_per_engine, engine.args, ranks
CASES: list[tuple[str, int, dict[str, Any], tuple[int, ...]]] = [
    ("deepseek-r1", 16, {"ep_size": 16, "attn_dp_size": 2, **FP8}, (0, 9)),
    ("deepseek-r1", 64, {"ep_size": 64, "attn_dp_size": 8, "moe_a2a_backend": "deepep", "moe_dense_tp_size": 1}, (63,)),
    ("deepseek-r1", 16, {}, (5,)),
    ("kimi-k2", 32, {"ep_size": 8}, (7, 31)),
    ("deepseek-v2-lite", 2, {"ep_size": 2}, (1,)),
    ("glm-4.5", 8, {"ep_size": 4}, (0, 5)),
    ("qwen3-30b-a3b", 8, {"ep_size": 8, **FP8}, (0, 6)),
    ("qwen3-30b-a3b", 8, {"moe_runner_backend": "triton"}, (5,)),  # 96 rows each
    ("qwen3-235b-a22b", 16, {"ep_size": 8, "attn_dp_size": 4}, (11,)),
    ("mixtral-8x22b", 8, {"ep_size": 4}, (3,)),
    ("qwen3-8b", 4, {}, (2,)),
    ("qwen2.5-7b", 4, {}, (3,)),
    ("llama-3.2-1b", 8, {}, (6,)),
]
IDS = [f"{model}-{gpus}-{'-'.join(args)}" for model, gpus, args, _ in CASES]


def small(model: str) -> HfConfig:
    hf = published_config(model)
    return replace(hf, values=dict(hf.values) | {"num_hidden_layers": min(LAYERS, hf.int("num_hidden_layers"))})


def wire_format(hf: HfConfig, args: dict[str, Any]) -> WireFormat:
    params = family_of(hf).params(hf)
    return WireFormat(params, dict.fromkeys(params, 1), torch.bfloat16, engine_uses_fp8(args, hf, cpu=False))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Copied]:
    """What is copied of each tensor, of each case and rank."""
    folder, cases = tmp_path_factory.mktemp("models"), {}
    for case, (model, gpus, args, ranks) in zip(IDS, CASES, strict=True):
        hf = small(model)
        wire = wire_format(hf, args)
        specs = [spec for name, param in wire.params.items() if not param.alias for spec in wire.specs(Piece(name))]
        arguments = cuda_arguments(settings_of(engine={"gpus_per_engine": gpus, "args": args}), hf, folder / case)
        tensors = {spec.name: [str(spec.dtype).removeprefix("torch."), spec.shape] for spec in specs}
        cases |= {f"{case} {rank}": {"arguments": arguments, "rank": rank, "tensors": tensors} for rank in ranks}
    process = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-m", "tests.rollout.record_loaders"],
        input=json.dumps(cases),
        env={**os.environ, "PYTHONPATH": f"{ENGINE_SITE}:{Path(__file__).parents[2]}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    facts: dict[str, Copied] = json.loads(process.stdout.splitlines()[-1])
    return facts


@pytest.mark.parametrize(
    ("case", "rank"), [(case, rank) for case, (*_, ranks) in enumerate(CASES) for rank in ranks], ids=str
)
def test_the_plan_brings_what_the_loaders_keep(recorded: dict[str, Copied], case: int, rank: int) -> None:
    model, gpus, args, _ = CASES[case]
    hf, kept = small(model), recorded[f"{IDS[case]} {rank}"]
    assert "error" not in kept, kept["error"]
    wire, parallelism = wire_format(hf, args), engine_parallelism(gpus, args, hf)
    readers = engine_readers((0,), parallelism, expert_alignment(parallelism, args, wire.fp8, cpu=False))
    brought = [
        (Piece(name, slice_), group.expert)
        for group in group_params(wire.params)
        for slice_, ranks in readers(group).items()
        for name in group.names
        if rank in ranks
    ]
    assert {spec.name for spec in wire.all_specs(piece for piece, _ in brought)} == kept.keys()
    experts = [piece for piece, expert in brought if expert is not None]
    assert len(experts) * parallelism.expert == sum(param.expert is not None for param in wire.params.values())
    for spec in wire.all_specs(experts):
        elements, first, last = kept[spec.name]
        assert prod(spec.shape) == elements
        dim, number, total = spec.sliced or (0, 0, 1)
        assert total == parallelism.expert_tensor
        size, stride = spec.shape[dim], prod(spec.full_shape[dim + 1 :])
        along = [place // stride % spec.full_shape[dim] for place in (first, last)]
        assert along == [number * size, (number + 1) * size - 1]


def test_every_family_is_recorded() -> None:
    families = {family_of(small(model)) for model, *_ in CASES}
    assert {family.architecture for family in families} == {family.architecture for family in FAMILIES.values()}
