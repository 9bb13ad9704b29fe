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
from grpo_mp.models.hf_config import RANGES, HfConfig
from grpo_mp.models.tokenizer import read_tokenizer
from grpo_mp.planner.model_configs import find_config, published_config
from grpo_mp.policy.policy import check_policy
from tests.bad_input.doors import NO_TEXT, NOT_FILES, Content, answers, as_nobody, noise, put, refused, tree
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


CONFIGS: dict[str, Content] = {
    **{name: content for name, content in NOT_FILES.items() if name != "nothing"},
    **NO_TEXT,
    "empty": b"",
    "a list": b"[]",
    "text": b'"qwen3"',
    "null": b"null",
    "no keys": b"{}",
    "two objects": b"{}{}",
    "a key twice": b'{"model_type": "qwen3", "model_type": "llama"}',
    "NaN": b'{"model_type": NaN}',
    "infinite": b'{"rms_norm_eps": 1e999}',
    "deep": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "digits": b'{"hidden_size": ' + b"9" * 5000 + b"}",
    "a comment": b'{"model_type": "qwen3"} // mine',
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_files(name: str, folder: Path) -> None:
    put(folder / "config.json", CONFIGS[name])
    before = tree(folder)
    with as_nobody(name):
        assert "config.json" in refused(lambda: read_model(folder))
        refused(lambda: family_of(find_config(folder, folder)[0]))
    assert tree(folder) == before


BAD_SIZES: tuple[Any, ...] = (0, -1, 1.5, "many", "", True, [64], {"a": 1}, 2**62, 1e300, "1e400")
BAD_NUMBERS: tuple[Any, ...] = (0, -1.0, "many", [1.0], {}, True)


def configs() -> list[str]:
    shipped = Path(find_config.__code__.co_filename).with_name("published")
    return sorted(path.stem for path in shipped.glob("*.json"))


@pytest.mark.parametrize("published", configs())
def test_every_number_of_every_family(published: str, tmp_path: Path) -> None:
    values = published_config(published).values
    bad = dict.fromkeys(values.keys() & RANGES.keys(), BAD_SIZES) | dict.fromkeys(
        ("rms_norm_eps", "rope_theta"), BAD_NUMBERS
    )
    for key, numbers in bad.items():
        for number in numbers:
            if number == 0 and RANGES.get(key, (1,))[0] == 0:
                continue
            put(tmp_path / "config.json", json.dumps(values | {key: number}).encode())
            refused(lambda: read_model(tmp_path))


CHANGES: dict[str, dict[str, Any]] = {
    "a foreign type": {"model_type": "mamba"},
    "a list as type": {"model_type": ["deepseek_v3"]},
    "a foreign architecture": {"architectures": ["MambaForCausalLM"]},
    "architectures as text": {"architectures": "DeepseekV3ForCausalLM"},
    "more chosen experts than there are": {"num_experts_per_tok": 9},
    "an end token outside of the vocabulary": {"eos_token_id": 10**9},
    "a negative end token": {"eos_token_id": -1},
    "an end token that is text": {"eos_token_id": "</s>"},
    "end tokens of which one is outside": {"eos_token_id": [1, 10**9]},
    "rope scaling as text": {"rope_scaling": "yarn"},
    "rope scaling as a list": {"rope_scaling": [1]},
    "rope scaling of an unknown kind": {"rope_scaling": {"type": "magic", "factor": 2}},
    "rope scaling of a list as kind": {"rope_scaling": {"type": ["yarn"], "factor": 2}},
    "rope scaling without a factor": {"rope_scaling": {"type": "yarn"}},
    "rope scaling by 0": {"rope_scaling": {"type": "yarn", "factor": 0, "original_max_position_embeddings": 64}},
    "rope scaling by text": {
        "rope_scaling": {"type": "yarn", "factor": "many", "original_max_position_embeddings": 64}
    },
    "rope scaling with a list": {
        "rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": [1], "original_max_position_embeddings": 64}
    },
    "an unknown activation": {"hidden_act": "magic"},
    "an unknown scoring": {"scoring_func": "magic"},
    "tied as text": {"tie_word_embeddings": "no"},
    "quantization as text": {"quantization_config": "fp8"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_configs(name: str, folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    values.pop("rope_parameters", None)
    put(folder / "config.json", json.dumps(values | CHANGES[name]).encode())
    assert "config.json" in refused(lambda: read_model(folder))


def test_noise_in_a_config(folder: Path) -> None:
    content = (folder / "config.json").read_bytes()
    for changed in noise(content, count=300, seed=3):
        answers(lambda changed=changed: read_model(put(folder / "config.json", changed).parent))


# -- weights -------------------------------------------------------------------------------------------------


def header(text: bytes, size: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text) if size is None else size) + text + data


WEIGHTS: dict[str, Content] = {
    **{name: content for name, content in NOT_FILES.items() if name != "nothing"},
    "empty": b"",
    "binary": bytes(range(256)),
    "text": b"weights",
    "a header of 2^63 bytes": header(b"{}", 2**63),
    "a header of all bytes": header(b"{}", 2**64 - 1),
    "a header of a gigabyte": header(b"{}", 10**9),
    "a header that is no JSON": header(b"{"),
    "a header that is a list": header(b"[]"),
    "no tensors": header(b"{}"),
    "an unknown type": header(b'{"a": {"dtype": "F7", "shape": [1], "data_offsets": [0, 4]}}', data=bytes(4)),
    "a negative shape": header(b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', data=bytes(4)),
    "offsets beyond the end": header(b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}', data=bytes(4)),
    "offsets that go back": header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}', data=bytes(4)),
    "a shape of 2^64 elements": header(
        b'{"a": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 4]}}', data=bytes(4)
    ),
    "a deep header": header(b"[" * 100_000),
}


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
    with as_nobody(name):
        refused(lambda: open_weights(folder))
        answers(lambda: describe_hf(folder))


def test_noise_in_the_header_of_weights(folder: Path) -> None:
    file = folder / SINGLE_FILE
    content = file.read_bytes()
    size = 8 + struct.unpack("<Q", content[:8])[0]
    for changed in noise(content[:size], count=60, seed=4):
        answers(lambda changed=changed: open_weights(put(file, changed + content[size:]).parent))


INDEXES: dict[str, Content] = {
    **{
        name: content
        for name, content in NOT_FILES.items()
        if name
        not in (
            "nothing",
            "folder",
            "pipe",
            "link to itself",
            "link to nothing",
            "link to endless zeros",
            "link to an empty device",
        )
    },
    **NO_TEXT,
    "empty": b"",
    "a list": b"[]",
    "no map": b"{}",
    "a map of nothing": b'{"weight_map": {}}',
    "a list as map": b'{"weight_map": []}',
    "text as map": b'{"weight_map": "x"}',
    "a number as file": b'{"weight_map": {"a": 3}}',
    "null as file": b'{"weight_map": {"a": null}}',
    "an empty file": b'{"weight_map": {"a": ""}}',
    "a file elsewhere": b'{"weight_map": {"a": "../../etc/passwd"}}',
    "a file of another root": b'{"weight_map": {"a": "/etc/passwd"}}',
    "a file above": b'{"weight_map": {"a": "../model.safetensors"}}',
    "a file with a zero character": b'{"weight_map": {"a": "model\\u0000.safetensors"}}',
    "a file of a long name": json.dumps({"weight_map": {"a": "x" * 300 + ".safetensors"}}).encode(),
    "a file that is not there": b'{"weight_map": {"a": "gone.safetensors"}}',
    "the index itself": b'{"weight_map": {"a": "model.safetensors.index.json"}}',
    "a tensor twice": b'{"weight_map": {"a": "model.safetensors", "a": "gone.safetensors"}}',
    "deep": b'{"weight_map": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("name", INDEXES)
def test_indexes(name: str, folder: Path) -> None:
    put(folder / INDEX, INDEXES[name])
    with as_nobody(name):
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


TOKENIZERS: dict[str, tuple[str, Content]] = {
    **{f"tokenizer.json: {name}": ("tokenizer.json", content) for name, content in NO_TEXT.items()},
    "tokenizer.json: empty": ("tokenizer.json", b""),
    "tokenizer.json: no keys": ("tokenizer.json", b"{}"),
    "tokenizer.json: a list": ("tokenizer.json", b"[]"),
    "tokenizer.json: no model": ("tokenizer.json", b'{"version": "1.0", "model": null}'),
    "tokenizer.json: a foreign model": ("tokenizer.json", b'{"version": "1.0", "model": {"type": "Magic"}}'),
    "tokenizer.json: deep": ("tokenizer.json", b'{"model": ' + b"[" * 10_000),
    "tokenizer_config.json: empty": ("tokenizer_config.json", b""),
    "tokenizer_config.json: a list": ("tokenizer_config.json", b"[]"),
    "tokenizer_config.json: binary": ("tokenizer_config.json", bytes(range(256))),
    "tokenizer_config.json: deep": ("tokenizer_config.json", b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers(name: str, folder: Path) -> None:
    file, content = TOKENIZERS[name]
    put(folder / file, content)
    refused(lambda: read_tokenizer(folder, HfConfig.read(folder)))


def test_noise_in_a_tokenizer(folder: Path) -> None:
    content, hf = (folder / "tokenizer.json").read_bytes(), HfConfig.read(folder)
    for changed in noise(content, count=25, seed=5):
        put(folder / "tokenizer.json", changed)
        answers(lambda: read_tokenizer(folder, hf))
