"""Weights in FP8 beside adapters: bits of an FP8 folder, what autograd keeps, what a resume and an export say."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from grpo_mp.checkpoint.hf_reader import HfReader, read_non_policy_tensors
from grpo_mp.checkpoint.hf_writer import begin_hf, complete_hf, write_shards
from grpo_mp.config import check_settings
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.models.families import family_of
from grpo_mp.models.fp8 import SCALE, dequantize, dequantize_at_once, quantize
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param
from grpo_mp.policy import fp8 as fp8_base
from grpo_mp.policy.checkpoint import load_policy
from grpo_mp.policy.offload import frozen_weights
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.shared_prompt_attention import packed_sequences
from grpo_mp.policy.weights import _stored_fp8
from grpo_mp.utils.errors import UserError
from tests.parallel.lora import rounded
from tests.planner.jobs import BASE
from tests.save_policy import save_policy
from tools.tiny.models import make_tiny, make_tokenizer

LORA = {"rank": 2, "alpha": 4.0}
# Whole blocks, also of one part of two, and blocks that an edge cuts.
SHAPE = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 256}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny(folder, "deepseek_v3", make_tokenizer(["apples"]), **SHAPE)
    return folder


def fp8_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield a folder's tensors, with projections as blockwise FP8 and their factors, which are stretched."""
    hf = HfConfig.read(folder)
    with HfReader(folder, dequantize_to=torch.float32) as reader:
        for param in family_of(hf).params(hf).values():
            for name in () if param.alias else param.hf:
                tensor = reader.read(name)
                if not param.is_projection:
                    yield name, tensor
                    continue
                weight, scale = quantize(tensor)
                yield name, weight
                yield f"{name}{SCALE}", scale * 1.3


@pytest.fixture(scope="module")
def fp8_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    others = read_non_policy_tensors(model, HfConfig.read(model), True)
    begin_hf(folder)
    shards = write_shards(folder, fp8_tensors(model), 0) + write_shards(folder, others, 1)
    complete_hf(folder, shards, model, True)
    return folder


def policy_of(folder: Path, parallel: Parallel, **lora: Any) -> Policy:
    tree = BASE | {"model": {"path": folder, "dtype": "float32", "lora": LORA | lora}}
    return Policy(check_settings(tree, "test"), parallel, with_reference=False)


def test_bits_and_factors_of_an_fp8_folder_are_taken_over(fp8_model: Path, parallel: Parallel) -> None:
    policy = policy_of(fp8_model, parallel, base_dtype="fp8")
    with HfReader(fp8_model) as reader:
        stored = {name: reader.read_stored(name) for name in reader.stored_names}
    compared = 0
    for name, param in policy.base_params.items():
        if name not in policy.tensors or not param.is_projection:
            continue
        rows = [stored[one].view(torch.uint8) for one in param.hf]
        factors = [stored[f"{one}_scale_inv"] for one in param.hf]
        if any(one.shape[0] % 128 for one in rows[:-1]):
            continue  # a block holds rows of two tensors
        own, scale = policy.tensors[name].view(torch.uint8), fp8_base.scale_of(policy.tensors[name])
        assert torch.equal(own, torch.cat(rows))
        assert scale is not None
        assert torch.equal(scale, torch.cat(factors))
        compared += 1
    assert compared > 20


@pytest.mark.parametrize("parts", [2])
def test_parts_take_bits_over_where_their_blocks_are_whole(parts: int, fp8_model: Path, parallel: Parallel) -> None:
    params = policy_of(fp8_model, parallel).base_params
    whole: dict[bool, int] = {True: 0, False: 0}
    with HfReader(fp8_model, dequantize_to=torch.float32) as reader:
        for param in (one for one in params.values() if one.is_projection and one.tp_dim is not None):
            aligned = all(shape[param.tp_dim] // parts % 128 == 0 for shape in param.shapes)
            for part in range(parts):
                found = _stored_fp8(param, reader, parts, part)
                assert found or not aligned
                if found:
                    assert torch.equal(dequantize(*found, torch.float32), values(param, reader, parts, part))
                whole[found is not None] += 1
    assert min(whole.values()) > 0


def values(param: Param, reader: HfReader, parts: int, part: int) -> Tensor:
    assert param.tp_dim is not None
    assert param.fuse in ("none", "gate_up")
    return torch.cat([reader.read(name).chunk(parts, param.tp_dim)[part] for name in param.hf])


def test_what_is_computed_at_once_is_the_same_bit_for_bit() -> None:
    for shape in ((300, 257), (256, 384), (5, 3)):
        weight, scale = quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(dequantize_at_once(weight, scale, dtype), dequantize(weight, scale, dtype))


class Saved:
    """Bytes that autograd keeps for a backward pass, each storage once, without those of `held` tensors."""

    def __init__(self, held: Sequence[Tensor]) -> None:
        self.held = {tensor.untyped_storage().data_ptr() for tensor in held}
        self.storages: dict[int, tuple[Any, int]] = {}

    def count(self, tensor: Any) -> Any:
        if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()).data_ptr() not in self.held:
            self.storages[storage.data_ptr()] = (storage, storage.nbytes())  # held: no other takes its place
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.storages.values())


def saved_bytes(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> int:
    saved = Saved(fp8_base.with_scales(policy.tensors).values())  # type: ignore[arg-type]

    def inner(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda tensor: saved.count(pack(tensor)), unpack)

    monkeypatch.setattr(fp8_base, "saved_tensors_hooks", inner)
    (chunk,) = policy.models()
    tokens = torch.arange(1, 41)[None]
    with saved_tensors_hooks(saved.count, lambda tensor: tensor):
        output = chunk(
            tokens,
            torch.arange(40)[None],
            None,
            labels=tokens,
            packed_seq_params=packed_sequences((40,), torch.device("cpu")),
        )
    output[0].sum().backward()
    return saved.nbytes


def test_no_value_of_a_weight_is_kept_for_the_backward_pass(
    model: Path, parallel: Parallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, low = policy_of(model, parallel), policy_of(model, parallel, base_dtype="fp8")
    linear = [name for name, tensor in low.tensors.items() if tensor.dtype == torch.float8_e4m3fn]
    with torch.no_grad():  # routers choose alike
        for name in linear:
            plain.tensors[name].copy_(rounded(plain.tensors[name]))
    expected = saved_bytes(plain, monkeypatch)
    assert saved_bytes(low, monkeypatch) == expected > 0
    elements = sum(low.tensors[name].numel() for name in linear)
    factors = sum(-(-low.tensors[name].shape[0] // 128) * -(-low.tensors[name].shape[1] // 128) for name in linear)
    frozen = [sum(tensor.nbytes for tensor in frozen_weights(policy)) for policy in (plain, low)]
    assert frozen[0] - frozen[1] == 3 * elements - 4 * factors


def test_a_resume_beside_weights_of_another_precision_is_refused(
    model: Path, parallel: Parallel, tmp_path: Path
) -> None:
    (tmp_path / "saved").mkdir()
    policy = policy_of(model, parallel, base_dtype="fp8")
    save_policy(policy, tmp_path / "saved")
    load_policy(policy_of(model, parallel, base_dtype="fp8"), tmp_path / "saved")
    with pytest.raises(UserError, match=r"adapters are of rank 2 .* beside weights in fp8, those of model\.lora of"):
        load_policy(policy_of(model, parallel), tmp_path / "saved")
