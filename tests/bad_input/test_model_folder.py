"""Model folders that hold no model: config.json, weights and their index, tokenizer."""

import json
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_mp.checkpoint.convert import to_megatron
from grpo_mp.checkpoint.describe import describe_hf
from grpo_mp.checkpoint.hf_reader import INDEX, SINGLE_FILE, HfReader, check_tensors
from grpo_mp.config.sections import LayoutConfig, ModelConfig, TrainingConfig
from grpo_mp.distributed.layout import model_shape
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.tokenizer import read_tokenizer
from grpo_mp.planner.model_configs import find_config
from grpo_mp.policy.policy import check_policy
from tests.bad_input.doors import answers, put, refused, tree
from tests.conftest import TinyRun
from tools.tiny.models import make_tiny, make_tokenizer


@pytest.fixture
def folder(tiny_run: TinyRun, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be damaged."""
    tmp_path.chmod(0o755)
    return Path(shutil.copytree(tiny_run.model, tmp_path / "model"))


def read_model(folder: Path) -> Any:
    """What every command does with config.json: Megatron's settings, sizes, and the names of all tensors."""
    hf = HfConfig.read(folder)
    family = family_of(hf)
    return family.config(hf), model_shape(hf), family.params(hf)


CONFIGS: dict[str, bytes] = {"empty": b"", "a list": b"[]", "no keys": b"{}"}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_files(name: str, folder: Path) -> None:
    put(folder / "config.json", CONFIGS[name])
    before = tree(folder)
    assert "config.json" in refused(lambda: read_model(folder))
    refused(lambda: family_of(find_config(folder, folder)[0]))
    assert tree(folder) == before


CHANGES: dict[str, dict[str, Any]] = {
    "a foreign type": {"model_type": "mamba"},
    "rope scaling of an unknown kind": {"rope_scaling": {"type": "magic", "factor": 2}},
    "rope scaling without a factor": {"rope_scaling": {"type": "yarn"}},
    "an unknown activation": {"hidden_act": "magic"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_configs(name: str, folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    values.pop("rope_parameters", None)
    put(folder / "config.json", json.dumps(values | CHANGES[name]).encode())
    assert "config.json" in refused(lambda: read_model(folder))


# -- weights -------------------------------------------------------------------------------------------------


WEIGHTS: dict[str, bytes] = {"empty": b"", "text": b"weights", "no tensors": struct.pack("<Q", 2) + b"{}"}


def open_weights(folder: Path) -> None:
    """Open a folder's weights and compare them with its config, as a start does."""
    hf = HfConfig.read(folder)
    with HfReader(folder) as reader:
        check_tensors(reader, [param for param in family_of(hf).params(hf).values() if not param.alias])


Q_BIAS = "model.layers.{}.self_attn.q_proj.bias"
UNREAD = {
    "biases of one layer": {Q_BIAS.format(0): (64,)},
    "biases of all layers": {Q_BIAS.format(layer): (64,) for layer in range(4)},
    "an adapter": {f"model.layers.0.mlp.up_proj.lora_{name}.weight": (2, 2) for name in "AB"},
    "a scale without its weight": {"model.layers.0.mlp.gone.weight_scale_inv": (1, 1)},
    "a head": {"score.weight": (1, 64)},
    "another model beside it": {"visual.patch_embed.weight": (2, 2)},
}
HARMLESS = {
    "rotary tables": {f"model.layers.0.self_attn.rotary_emb.{name}": (4,) for name in ("inv_freq", "cos_cached")},
    "a copy of the embedding": {"lm_head.weight": (16, 64)},
}


@pytest.mark.parametrize("name", [*UNREAD, *HARMLESS])
def test_tensors_that_nothing_reads(name: str, tmp_path: Path) -> None:
    """A start and a conversion give the same answer."""
    folder = tmp_path / "model"
    make_tiny(folder, "llama", make_tokenizer(["apples"]), tie_word_embeddings=True)
    added = {tensor: torch.ones(shape) for tensor, shape in (UNREAD | HARMLESS)[name].items()}
    save_file(load_file(folder / SINGLE_FILE) | added, folder / SINGLE_FILE, metadata={"format": "pt"})
    model = ModelConfig(path=folder, dtype="float32")
    start = partial(check_policy, HfConfig.read(folder), model, LayoutConfig(), TrainingConfig(), 1)
    convert = partial(to_megatron, folder, tmp_path / "megatron", lambda written, total: None)
    if name in UNREAD:
        messages = {refused(start), refused(convert)}
        assert len(messages) == 1
        assert f"the mapping of llama does not know the tensor {min(added)}" in messages.pop()
    else:
        start()
        convert()


def test_the_tiny_weights_are_whole(folder: Path) -> None:
    open_weights(folder)


@pytest.mark.parametrize("name", WEIGHTS)
def test_weight_files(name: str, folder: Path) -> None:
    put(folder / SINGLE_FILE, WEIGHTS[name])
    refused(lambda: open_weights(folder))
    answers(lambda: describe_hf(folder))


INDEXES: dict[str, bytes] = {
    "no map": b"{}",
    "a file elsewhere": b'{"weight_map": {"a": "../../etc/passwd"}}',
    "a file that is not there": b'{"weight_map": {"a": "gone.safetensors"}}',
}


@pytest.mark.parametrize("name", INDEXES)
def test_indexes(name: str, folder: Path) -> None:
    put(folder / INDEX, INDEXES[name])
    assert "model" in refused(lambda: open_weights(folder))


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in tensors.items() if key != name}


NORM = "model.norm.weight"
TENSORS: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "one is missing": lambda tensors: without(tensors, NORM),
    "one of another shape": lambda tensors: tensors | {NORM: torch.ones(3)},
    "one of no dimension": lambda tensors: tensors | {NORM: torch.tensor(1.0)},
    "one of integers": lambda tensors: tensors | {NORM: torch.ones_like(tensors[NORM], dtype=torch.int64)},
    "one of booleans": lambda tensors: tensors | {NORM: torch.ones_like(tensors[NORM], dtype=torch.bool)},
    "no tensor": lambda tensors: {},
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name: str, folder: Path) -> None:
    save_file(TENSORS[name](load_file(folder / SINGLE_FILE)), folder / SINGLE_FILE)
    refused(lambda: open_weights(folder))


# -- tokenizer -----------------------------------------------------------------------------------------------


TOKENIZERS: dict[str, tuple[str, bytes]] = {
    "tokenizer.json: no keys": ("tokenizer.json", b"{}"),
    "tokenizer_config.json: a list": ("tokenizer_config.json", b"[]"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers(name: str, folder: Path) -> None:
    file, content = TOKENIZERS[name]
    put(folder / file, content)
    refused(lambda: read_tokenizer(folder, HfConfig.read(folder)))
