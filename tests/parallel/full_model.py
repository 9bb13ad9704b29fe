"""The ranks' shards -> whole tensors by Hugging Face name; and how far two sets of tensors are apart."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_mp.checkpoint.hf_reader import HfReader
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.lora import adapter_params
from grpo_mp.models.mapping import Param, join, unfuse
from grpo_mp.models.multi_token_prediction import COPIED_EMBEDDING
from tests.parallel.cases import LORA

Tensors = dict[str, Tensor]


def file_tensors(folder: Path) -> Tensors:
    """All tensors of a Hugging Face folder."""
    with HfReader(folder) as reader:
        return {name: reader.read(name) for name in reader.names}


def full_tensors(
    folder: Path,
    shards: Sequence[Mapping[str, Tensor]],
    held: Sequence[dict[str, Any]],
    tolerance: float = 0.0,
    params: Mapping[str, Param] | None = None,
) -> Tensors:
    """Join what the ranks hold of the model of a folder, or of `params`; parameters that no rank holds are left out.

    Ranks that hold the same part must agree about it to a relative `tolerance`, and so must a tied copy.
    """
    trains_mtp = any(COPIED_EMBEDDING in of_rank["counts"] for of_rank in held)
    hf = HfConfig.read(folder, trains_mtp=trains_mtp)
    full: Tensors = {}
    params = params or family_of(hf).params(hf)
    if any(".lora_A." in name for name in held[0]["counts"]):
        params |= adapter_params(params, LORA["rank"], None)
    for name, param in params.items():
        copies = [(held["parts"][name], shard[name]) for shard, held in zip(shards, held, strict=True) if name in shard]
        if not copies:
            continue
        count = next(held["counts"][name] for held in held) if param.tp_dim is not None else 1
        pieces = [unfuse(param, _check_replicas_equal(name, part, copies, tolerance)) for part in range(count)]
        for hf_name, tensor in zip(param.hf, join(param, pieces), strict=True):
            assert relative_error(tensor, full.get(hf_name, tensor)) <= tolerance, f"{name} is not the other {hf_name}"
            full[hf_name] = tensor
    return full


def _check_replicas_equal(name: str, part: int, copies: list[tuple[int, Tensor]], tolerance: float) -> Tensor:
    same = [tensor for at, tensor in copies if at == part]
    assert same, f"no rank holds part {part} of {name}"
    assert all(relative_error(tensor, same[0]) <= tolerance for tensor in same), (
        f"ranks disagree about {name}, part {part}"
    )
    return same[0]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    difference = float((actual - expected).norm())
    return difference / float(expected.norm()) if difference else 0.0


def difference(a: Tensors, b: Tensors) -> Tensors:
    """In float64."""
    assert a.keys() == b.keys()
    return {name: tensor.double() - b[name].double() for name, tensor in a.items()}


def relative_errors(actual: Tensors, expected: Tensors) -> dict[str, float]:
    """Relative distance over all tensors together ('all'), and over each kind of tensor ('model.layers.*.mlp...')."""
    assert actual.keys() == expected.keys()
    kinds: dict[str, list[str]] = {"all": list(expected)}
    for name in expected:
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return {kind: relative_error(_flat(actual, names), _flat(expected, names)) for kind, names in kinds.items()}


def exceeding(errors: Mapping[str, float], bound: float) -> dict[str, float]:
    """The errors that are not within the bound; also those that are no number."""
    return {kind: error for kind, error in errors.items() if not error <= bound}


def _flat(tensors: Tensors, names: Sequence[str]) -> Tensor:
    return torch.cat([tensors[name].double().flatten() for name in names])
