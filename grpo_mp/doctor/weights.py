"""The weights of a model folder: as the policy holds them, as an engine does, and as blockwise FP8 leaves them."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from grpo_mp.checkpoint.hf_reader import HfReader, read_non_policy_tensors
from grpo_mp.checkpoint.hf_writer import begin_hf, complete_hf, write_shards
from grpo_mp.models.families import family_of
from grpo_mp.models.fp8 import SCALE, dequantize, quantize
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param, unfuse
from grpo_mp.utils.findings import Finding, Level

MOST_NAMED = 5  # tensors that evidence lists
NamedTensors = Iterable[tuple[str, Tensor]]


def params_of(folder: Path) -> dict[str, Param]:
    """Return the parameters of a folder's model that the policy trains, by Megatron's names."""
    hf = HfConfig.read(folder)
    return {name: param for name, param in family_of(hf).params(hf).items() if not param.alias}


def hf_tensors(tensors: Mapping[str, Tensor], params: Mapping[str, Param]) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face tensors of a policy on one rank, by the mapping, without the vocabulary's padding."""
    for name, param in params.items():
        for hf_name, shape, tensor in zip(param.hf, param.shapes, unfuse(param, tensors[name].detach()), strict=True):
            yield hf_name, tensor[: shape[0]]


def check_policy_weights(folder: Path, tensors: Mapping[str, Tensor], params: Mapping[str, Param]) -> Finding:
    """Return whether the policy holds the folder's weights, bit for bit in its dtype; else the first that differs."""
    differing, count = list[str](), 0
    with HfReader(folder, dequantize_to=torch.float32) as reader:
        for name, tensor in hf_tensors(tensors, params):
            count += 1
            expected = reader.read(name).to(tensor.dtype)
            if not torch.equal(tensor.cpu(), expected):
                distance = float((tensor.cpu().float() - expected.float()).abs().max())
                differing.append(f"{name}: up to {distance:.2g} apart")
    if differing:
        advice = "compare the rule of that tensor in grpo_mp/models with the model's own code"
        sentence = f"the policy holds other weights than the folder, first {differing[0]}"
        more = [f"{len(differing)} of {count} tensors differ", *differing[:MOST_NAMED]]
        return Finding(Level.ERROR, sentence, more, advice)
    return Finding(Level.OK, f"the policy holds the folder's {count} tensors, through the mapping and back")


def check_engine_weights(loaded: Mapping[str, str], exported: Mapping[str, str]) -> Finding:
    """Return whether an engine holds the same by its checksums from the folder and from the policy's export."""
    differing = [name for name in [*loaded, *exported] if loaded.get(name) != exported.get(name)]
    if differing:
        advice = "a name, shape or order of the mapping in grpo_mp/models is wrong, or the engine keeps that tensor"
        sentence = f"the engine holds other weights from the policy's export than from the folder, first {differing[0]}"
        names = list(dict.fromkeys(differing))
        return Finding(Level.ERROR, sentence, [f"{len(names)} tensors differ", *names[:MOST_NAMED]], advice)
    return Finding(Level.OK, f"the engine's {len(loaded)} tensors are those of the policy's export, by its checksums")


def write_folder(folder: Path, tensors: NamedTensors, like: Path, fp8: bool = False) -> Path:
    """Write tensors of the policy as a Hugging Face folder, with all else of `like`; return it.

    `fp8`: whether these are blockwise FP8, with their factors.
    """
    others = read_non_policy_tensors(like, HfConfig.read(like), fp8)
    begin_hf(folder)
    shards = write_shards(folder, tensors, 0) + write_shards(folder, others, 1)
    complete_hf(folder, shards, like, fp8)
    return folder


def fp8_tensors(folder: Path, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Yield a folder's tensors, those that releases quantize as blockwise FP8 rounds them.

    They are in `dtype`; None: these are FP8 bytes and factors, the others as they are stored.
    """
    with HfReader(folder, dequantize_to=torch.float32) as reader:
        for param in params_of(folder).values():
            for name in param.hf:
                tensor = reader.read(name)
                if not param.is_projection:
                    yield name, tensor if dtype is None or param.keep_float32 else tensor.to(dtype)
                elif dtype is None:
                    weight, scale = quantize(tensor)
                    yield name, weight
                    yield f"{name}{SCALE}", scale
                else:
                    yield name, dequantize(*quantize(tensor), dtype)
