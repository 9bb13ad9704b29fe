"""The complete parameter lists of published models, from their configs alone, against transformers' own modules."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_mp.models.families import TRANSFORMERS_NAMES, family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param
from tests.models.published import PUBLISHED


def params_of(values: dict[str, Any]) -> list[Param]:
    hf = HfConfig(Path("published"), values)
    family = family_of(hf)
    assert family.config(hf)["num_layers"] == values["num_hidden_layers"]
    return [param for param in family.params(hf).values() if not param.alias]


def count_in_transformers(values: dict[str, Any]) -> int:
    model_type = TRANSFORMERS_NAMES.get(values["model_type"], values["model_type"])
    rest = {key: value for key, value in values.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **rest))
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_mapping_has_each_tensor_once(name: str) -> None:
    values, published_size = PUBLISHED[name]
    params = params_of(values)
    assert {count for _, count in Counter(name for param in params for name in param.hf).items()} == {1}
    elements = sum(math.prod(shape) for param in params for shape in param.shapes)
    assert elements == count_in_transformers(values)
    assert elements == pytest.approx(published_size, rel=0.01)
