"""Files, settings and commands that a user gets wrong: one sentence each, and nothing is written."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from megatron.core.ssm import gated_delta_net
from packaging.version import Version
from safetensors.torch import load_file, save_file

from grpo_mp import platform
from grpo_mp.checkpoint.convert import to_megatron
from grpo_mp.checkpoint.hf_reader import SINGLE_FILE, HfReader, check_model
from grpo_mp.cli.main import main
from grpo_mp.config import Settings, check_settings, load_settings
from grpo_mp.config.sections import LayoutConfig, ModelConfig, TrainingConfig
from grpo_mp.distributed.layout import check_layout, model_shape
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.planner.model_configs import named_config
from grpo_mp.policy.gated_delta_net import check_gated_delta_nets
from grpo_mp.policy.policy import check_policy
from grpo_mp.rollout.engine_layout import engine_parallelism
from grpo_mp.trainer.preflight import check_attention
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.section import nested_sections
from tests.conftest import TinyRun
from tests.minimal_settings import MINIMAL_SETTINGS
from tools.tiny.models import make_tiny, make_tokenizer

GOOD = yaml.safe_dump(MINIMAL_SETTINGS).encode()
ROOT = Path(__file__).parents[2]


def refused(door: Callable[[], Any]) -> str:
    """The one sentence with which the door refuses."""
    with pytest.raises(UserError) as raised:
        door()
    sentence = str(raised.value)
    assert sentence.strip()
    assert "\n" not in sentence
    return sentence


# -- settings ------------------------------------------------------------------------------------------------

SETTINGS = {
    "empty": b"",
    "binary": bytes(range(256)),
    "a setting twice": GOOD.replace(b"  lr:", b"  lr: 40000\n  lr:"),
    "a tag that runs code": GOOD + b"\nlayout: !!python/object/apply:os.getpid []\n",
    "an open quote": GOOD + b'\nschedule: "colocated\n',
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_files(name: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_bytes(SETTINGS[name])
    assert refused(lambda: load_settings(file)).startswith(str(file))


BAD: dict[type, tuple[Any, ...]] = {
    int: (float("nan"), "many", True, [1], {"a": 1}),
    float: (float("nan"), float("inf"), "many", True, [1]),
    str: (3, True, ["x"]),
    bool: (2, "maybe", None),
    Path: (3, None),
}
NEEDED: dict[str, Any] = {  # sections that are off by default
    "reward.model": {"path": "http://x"},
    "reward.judge": {"url": "http://x", "model": "x"},
    "reward.code": {"weight": 1.0},
    "reward.correct": {"term": "answer"},
    "algorithm.distillation": {"teacher": {"NAME": {"path": "http://x"}}},
    "data.train.NAME": {"path": "x"},
    "data.eval.NAME": {"path": "x"},
}


def fields_by_type() -> Iterator[tuple[str, type, bool]]:
    """Every setting of one plain type, by its dotted name, and whether it may be null."""
    for path, section in nested_sections(Settings):
        for name, field in section.model_fields.items():
            kinds = {item for item in (field.annotation, *get_args(field.annotation)) if isinstance(item, type)}
            plain = kinds - {type(None)}
            if len(plain) == 1 and (kind := plain.pop()) in BAD:
                yield f"{path}.{name}".removeprefix("."), kind, type(None) in kinds


def with_value(name: str, value: Any) -> dict[str, Any]:
    """The fewest settings with one of them changed."""
    settings: dict[str, Any] = yaml.safe_load(GOOD)
    settings["data"]["train"] = {"NAME": {"path": "x"}}
    *path, last = name.split(".")
    section = settings
    here = ""
    for part in path:
        here = f"{here}.{part}".removeprefix(".")
        section = section.setdefault(part, deepcopy(NEEDED.get(here, {})))
    section[last] = value
    return settings


def test_every_setting_refuses_values_of_other_types() -> None:
    for name, kind, may_be_null in fields_by_type():
        if name.endswith("tool_environment"):  # it takes a list, too
            continue
        for value in BAD[kind]:
            if value is not None or not may_be_null:
                assert name in refused(lambda name=name, value=value: check_settings(with_value(name, value), "here"))


# -- model folders -------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tiny_run: TinyRun, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be damaged."""
    return Path(shutil.copytree(tiny_run.model, tmp_path / "model"))


def open_weights(folder: Path) -> None:
    """Open a folder's weights and compare them with its config, as a start does."""
    hf = HfConfig.read(folder)
    with HfReader(folder) as reader:
        check_model(reader, family_of(hf).params(hf).values(), hf)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {name: tensor for name, tensor in tensors.items() if name != NORM},
        lambda tensors: tensors | {NORM: torch.ones(3)},
        lambda tensors: tensors | {NORM: torch.ones_like(tensors[NORM], dtype=torch.int64)},
    ],
)
def test_tensors(change: Callable[[dict[str, Any]], dict[str, Any]], folder: Path) -> None:
    open_weights(folder)
    save_file(change(load_file(folder / SINGLE_FILE)), folder / SINGLE_FILE)
    assert NORM in refused(lambda: open_weights(folder))


UNREAD = {
    "biases": {f"model.layers.{layer}.self_attn.q_proj.bias": (64,) for layer in range(4)},
    "a head": {"score.weight": (1, 64)},
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


# -- linear attention ----------------------------------------------------------------------------------------

KINDS = ["linear_attention", "full_attention"] * 2  # of the tiny model, in which every second layer has attention
LIES: dict[str, tuple[dict[str, Any], str]] = {
    "a kind too few": ({"layer_types": KINDS[:3]}, r"layer_types .* of the 4 layers .* set both"),
    "other kinds": ({"layer_types": KINDS[::-1]}, "engines read only the interval: set both as the weights have them"),
    "another interval": ({"full_attention_interval": 4}, r"every 4th \(full_attention_interval\) of the 4 layers"),
    "no interval, which counts as 4": ({"full_attention_interval": None}, r"every 4th \(full_attention_interval\)"),
    "an interval of 0": ({"full_attention_interval": 0}, "full_attention_interval=0: give a number"),
    "unknown kinds": ({"layer_types": "linear_attention"}, "layer_types does not name full_attention"),
    "other kinds than the tensors": (
        {"full_attention_interval": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
        r"tensors are missing, the first is model.layers.1.linear_attn.A_log: copy the folder again, its config.json",
    ),
    "fewer layers than tensors": (
        {"num_hidden_layers": 2, "layer_types": None},
        r"num_hidden_layers=2 .* do not cover model.layers.2.*: set them as the weights have them",
    ),
    "more layers than tensors": (
        {"num_hidden_layers": 6, "layer_types": None},
        "tensors are missing, .*model.layers.4",
    ),
    "heads that do not divide": ({"linear_num_value_heads": 6}, "must be a multiple of linear_num_key_heads"),
    "other heads than the tensors": ({"linear_num_key_heads": 2}, "has shape .* config.json says"),
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3.5 with experts, to be copied."""
    folder = tmp_path_factory.mktemp("hybrid") / "model"
    make_tiny(folder, "qwen3_5_moe_text", make_tokenizer(["apples"]))
    return folder


def start_training(folder: Path, **sizes: int) -> None:
    layout = LayoutConfig(**sizes)
    ranks = layout.tensor * layout.context
    check_policy(HfConfig.read(folder), ModelConfig(path=folder, dtype="float32"), layout, TrainingConfig(), ranks)


@pytest.mark.parametrize("lie", LIES)
def test_a_config_that_lies_about_linear_attention(lie: str, hybrid: Path, tmp_path: Path) -> None:
    start_training(hybrid, tensor=2)
    folder = Path(shutil.copytree(hybrid, tmp_path / "model"))
    changes, sentence = LIES[lie]
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    assert re.search(sentence, refused(lambda: start_training(folder)))


def test_sizes_that_do_not_divide_linear_heads(hybrid: Path) -> None:
    hf = HfConfig.read(hybrid)
    wide = HfConfig(hybrid, hf.values | {"num_attention_heads": 8, "num_key_value_heads": 8})
    too_many = refused(lambda: check_layout(LayoutConfig(tensor=8), model_shape(wide), 8))
    assert "tensor x context = 8 does not divide the 4 key heads of linear attention" in too_many
    engine_parallelism(8, {"attn_dp_size": 2}, wide)
    sentence = refused(lambda: engine_parallelism(8, {}, wide))
    assert "engine.args.attn_dp_size: 8 does not divide 4, the key heads of linear attention" in sentence


def test_machines_that_cannot_compute_linear_attention(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU, only that torch has one is made up; whether the kernels are there is Megatron's answer."""
    assert "on a CPU, linear attention computes whole sequences" in refused(lambda: start_training(hybrid, context=2))
    monkeypatch.setattr(platform, "on_cuda", lambda: True)
    divide = partial(check_gated_delta_nets, model_shape(HfConfig.read(hybrid)), 2)
    release = Version(version("megatron-core"))
    if release < Version("0.18"):
        assert f"megatron-core {release} computes no packed sequences" in refused(divide)
    else:
        divide()
    monkeypatch.setattr(gated_delta_net, "HAVE_FLA", False)
    assert "linear attention needs fla-core" in refused(lambda: start_training(hybrid))


def test_matrices_that_fp8_products_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "on_cuda", lambda: True)
    training = TrainingConfig(fp8_format="e4m3")
    for width, tensor in ((264, 1), (272, 2)):
        make_tiny(tmp_path, "qwen3", make_tokenizer(["apples"]), num_hidden_layers=1, intermediate_size=width)
        hf = HfConfig.read(tmp_path)
        model = ModelConfig(path=tmp_path, dtype="bfloat16")
        sentence = refused(partial(check_policy, hf, model, LayoutConfig(tensor=tensor), training, tensor))
        assert f"layout.tensor={tensor} a rank holds 128 x {width // tensor} elements of" in sentence


def test_what_computes_no_sinks_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a sequence that is divided, nor engines whose kernels keep experts in a layout that no sync can load."""
    hf = named_config("gpt-oss-20b")
    check_attention(hf, "bfloat16", 2)  # here
    monkeypatch.setattr(platform, "on_cuda", lambda: True)
    check_attention(hf, "bfloat16", 1)
    sentence = refused(lambda: check_attention(hf, "bfloat16", 2))
    assert "layout.context=2: TransformerEngine does not pass keys around a ring of GPUs" in sentence
    engine_parallelism(4, {"ep_size": 2, "moe_runner_backend": "triton"}, hf)
    backend = refused(lambda: engine_parallelism(4, {"moe_runner_backend": "flashinfer_trtllm"}, hf))
    assert "engine.args.moe_runner_backend=flashinfer_trtllm: new weights of gpt_oss are loaded only for" in backend
    sinks = refused(lambda: engine_parallelism(4, {"attention_backend": "flashinfer"}, hf))
    assert "engine.args.attention_backend=flashinfer: gpt_oss has attention sinks, which SGLang computes with" in sinks
    moved = refused(lambda: engine_parallelism(4, {"enable_eplb": True}, hf))
    assert "engine.args.enable_eplb: experts of gpt_oss stay where they are" in moved


# -- commands --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "",
        "fly",
        "train configs/tiny_moe.yaml --ranks x",
        "plan configs/moe_671b.yaml --nodes 0",
        "plan configs/moe_671b.yaml run.steps=0",
        "sample configs/tiny_moe.yaml --samples 0",
        "convert check none none",
        "launch none.yaml",
    ],
)
def test_commands(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    out, err = capfd.readouterr()
    assert (ended.value.code, err.count("\n")) == (2, 1), out
    assert err.startswith("error: ")
    assert [path.name for path in tmp_path.iterdir()] == ["configs"]
