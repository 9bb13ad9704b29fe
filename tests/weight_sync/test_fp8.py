"""An engine in blockwise FP8 gets the same tensors that `grpo-mp convert` writes to an FP8 folder."""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_mp.checkpoint.compare import compare_weights
from grpo_mp.checkpoint.convert import to_hf, to_megatron
from grpo_mp.checkpoint.hf_reader import HfReader
from grpo_mp.config import check_settings
from grpo_mp.distributed.process_groups import Parallel, single_rank_environment, start_parallel, stop_parallel
from grpo_mp.models.weight_formats import BLOCKWISE_FP8
from grpo_mp.policy.policy import Policy
from grpo_mp.weight_sync.plan import WHOLE
from grpo_mp.weight_sync.reshard import Resharder
from grpo_mp.weight_sync.update import plan_rounds
from grpo_mp.weight_sync.wire import WireFormat
from tests.planner.jobs import BASE
from tools.tiny.models import make_tiny, make_tokenizer


@pytest.fixture(scope="module")
def parallel() -> Iterator[Parallel]:
    with single_rank_environment():
        yield start_parallel(check_settings(BASE, "test").layout, 0, 60.0)
        stop_parallel()


# Of projections, what FP8 releases leave wide: the published modules_to_not_convert, as far as they are matrices.
WIDE = {
    "qwen3_moe": ("mlp.gate",),
    "deepseek_v3": ("mlp.gate",),
    "qwen3_next": ("linear_attn.in_proj_ba", "mlp.gate", "mlp.shared_expert_gate"),
    "qwen3_5_moe_text": ("linear_attn.in_proj_a", "linear_attn.in_proj_b", "mlp.gate", "mlp.shared_expert_gate"),
}


@pytest.mark.parametrize("family", WIDE)
def test_fp8_sync_equals_converter_output(family: str, parallel: Parallel, tmp_path: Path) -> None:
    """And the FP8 folder, converted there and back again, is itself."""
    model = tmp_path / "model"
    make_tiny(model, family, make_tokenizer(["apples"]), num_hidden_layers=2, hidden_size=160)
    weights = load_file(model / "model.safetensors")
    weights = {name: tensor if "correction_bias" in name else tensor.bfloat16() for name, tensor in weights.items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    to_megatron(model, tmp_path / "megatron", lambda done, total: None)
    to_hf(tmp_path / "megatron", tmp_path / "fp8", None, True, lambda done, total: None)

    policy = Policy(check_settings(BASE | {"model": {"path": model}}, "test"), parallel, with_reference=False)
    wire = WireFormat(policy.params, policy.tp_sizes(), torch.bfloat16, BLOCKWISE_FP8)
    rounds = plan_rounds(wire, policy.local_shards(), lambda _: {WHOLE: (0,)}, 2**20, parallel.cpu_group, 1)
    resharder = Resharder(rounds, wire, policy.tensors)
    sent = dict(chain.from_iterable(resharder.stages(rounds)))
    with HfReader(tmp_path / "fp8") as reader:
        assert sent.keys() == reader.stored_names
        assert any(tensor.dtype == torch.float8_e4m3fn for tensor in sent.values())
        for name, tensor in sent.items():
            stored = reader.read_stored(name)
            assert tensor.dtype == stored.dtype
            assert torch.equal(tensor.view(torch.uint8), stored.view(torch.uint8)), name
        matrices = {name for name in reader.names if ".layers." in name and len(reader.shape(name)) == 2}
        wide = {name.removesuffix(".weight") for name in matrices if reader.dtype(name) != torch.float8_e4m3fn}
    assert {name.split(".", 3)[3] for name in wide} == set(WIDE[family])
    kept = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert wide == {name for name in kept if ".layers." in name}
    to_megatron(tmp_path / "fp8", tmp_path / "again", lambda done, total: None)
    to_hf(tmp_path / "again", tmp_path / "back", None, True, lambda done, total: None)
    assert compare_weights(HfReader(tmp_path / "fp8"), HfReader(tmp_path / "back")) == []
