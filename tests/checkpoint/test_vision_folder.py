"""Folders of whole vision-language models, with stacked experts as they are published: the text model in them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Kimi_K25Config, Qwen3_5MoeConfig

from grpo_mp.checkpoint.hf_reader import HfReader, check_model, is_non_policy_tensor
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.trainer.save import export_policy
from tests.checkpoint.helpers import policy_of
from tools.tiny.models import TINY_CONFIGS, make_tokenizer

TEXT = TINY_CONFIGS["qwen3_5_moe_text"] | {"hidden_size": 32, "vocab_size": 160, "num_hidden_layers": 2}
VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3.5 whose file has the experts of a layer in one tensor, as in the published files."""
    folder = tmp_path_factory.mktemp("whole")
    torch.manual_seed(0)
    config = Qwen3_5MoeConfig(text_config=TEXT, vision_config=VISION)
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    # transformers leaves out the interval, which published folders have.
    values = json.loads((folder / "config.json").read_text())
    values["text_config"]["full_attention_interval"] = TEXT["full_attention_interval"]
    (folder / "config.json").write_text(json.dumps(values))
    make_tokenizer(["apples"]).save_pretrained(folder)
    tensors = {
        name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if ".experts." not in name
    }
    tensors |= {name: tensor.clone() for name, tensor in model.state_dict().items() if ".experts." in name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_the_text_model_is_mapped_and_the_tower_stays_outside(folder: Path) -> None:
    hf = HfConfig.read(folder)
    assert (hf.model_type, hf.is_text_part) == ("qwen3_5_moe_text", True)
    params = family_of(hf).params(hf)
    with HfReader(folder) as reader:
        check_model(reader, params.values(), hf)
        outside = [name for name in reader.names if is_non_policy_tensor(name, hf)]
        assert outside
        assert all(name.startswith("model.visual.") for name in outside)
        mapped = {name for param in params.values() for name in param.hf}
        assert mapped | set(outside) == reader.names


def test_the_layer_that_predicts_ahead_stands_beside_the_text_model(folder: Path) -> None:
    hf = HfConfig.read(folder, trains_mtp=True)
    hf = replace(hf, values=hf.values | {"mtp_num_hidden_layers": 1})
    params = family_of(hf).params(hf)
    layer = params["decoder.layers.2.mlp.experts.linear_fc1.weight3"].hf
    assert layer == tuple(f"mtp.layers.0.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up"))
    assert params["decoder.layers.2.eh_proj.weight"].hf == ("mtp.fc.weight",)
    assert params["decoder.layers.1.mlp.router.weight"].hf == ("model.language_model.layers.1.mlp.gate.weight",)


def test_experts_are_read_from_the_stacked_tensors(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    experts = "model.language_model.layers.1.mlp.experts"
    gate_up = stored[f"{experts}.gate_up_proj"]
    down = stored[f"{experts}.down_proj"]
    width = gate_up.shape[1] // 2
    with HfReader(folder) as reader:
        assert torch.equal(reader.read(f"{experts}.3.gate_proj.weight"), gate_up[3, :width])
        assert torch.equal(reader.read(f"{experts}.3.up_proj.weight"), gate_up[3, width:])
        assert torch.equal(reader.read(f"{experts}.3.up_proj.weight", 0, 2, 5), gate_up[3, width + 2 : width + 5])
        assert torch.equal(reader.read(f"{experts}.7.down_proj.weight", 1, 3, 8), down[7, :, 3:8])
        assert reader.shape(f"{experts}.7.down_proj.weight") == tuple(down.shape[1:])


def test_an_export_has_the_trained_text_model_and_the_tower(folder: Path, tmp_path: Path) -> None:
    with policy_of(folder, "float32") as policy:
        export_policy(policy, tmp_path / "export", folder, 2**20)
    with HfReader(folder) as given, HfReader(tmp_path / "export") as exported:
        assert exported.names == given.names
        assert all(torch.equal(exported.read(name), given.read(name)) for name in given.names)
    tokens = torch.arange(6, 30)[None]
    whole, again = (AutoModelForImageTextToText.from_pretrained(path) for path in (folder, tmp_path / "export"))
    assert torch.equal(whole(input_ids=tokens).logits, again(input_ids=tokens).logits)


def test_keys_of_the_whole_model_are_read_beside_those_of_the_text_model(folder: Path, tmp_path: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": {"quant_method": "fp8"}}))
    assert HfConfig.read(tmp_path).get("quantization_config") == {"quant_method": "fp8"}


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Kimi-K2.5, with the names of the published files."""
    folder = tmp_path_factory.mktemp("kimi")
    torch.manual_seed(0)
    text = TINY_CONFIGS["kimi_k2"] | {"hidden_size": 32, "vocab_size": 160, "num_hidden_layers": 2}
    tower = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    config = Kimi_K25Config(
        text_config={"model_type": "deepseek_v3"} | text,
        vision_config=tower | {"pos_emb_height": 4, "pos_emb_width": 4},
        projection_hidden_size=16,
        image_token_id=150,
        video_token_id=151,
        tie_word_embeddings=False,
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    # transformers reads these names of the publisher, but does not write them.
    published = {"language_model.model.blocks.": "language_model.model.layers.", "model.mm_projector.": "mm_projector."}
    tensors = load_file(folder / "model.safetensors")
    for ours, theirs in published.items():
        tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer(["apples"]).save_pretrained(folder)
    return folder


def test_the_text_model_of_kimi_is_mapped_by_published_names(kimi: Path) -> None:
    hf = HfConfig.read(kimi)
    assert hf.is_text_part
    params = family_of(hf).params(hf)
    with HfReader(kimi) as reader:
        check_model(reader, params.values(), hf)
        outside = {name for name in reader.names if is_non_policy_tensor(name, hf)}
        assert {name.split(".")[0] for name in outside} == {"vision_tower", "mm_projector"}
        mapped = {name for param in params.values() for name in param.hf}
        assert mapped | outside == reader.names
    assert {
        "language_model.model.layers.1.mlp.experts.0.down_proj.weight",
        "language_model.model.embed_tokens.weight",
        "language_model.model.layers.1.mlp.gate.e_score_correction_bias",
        "language_model.lm_head.weight",
    } <= mapped


def test_an_export_of_kimi_has_the_trained_text_model_and_the_tower(kimi: Path, tmp_path: Path) -> None:
    with policy_of(kimi, "float32") as policy:
        export_policy(policy, tmp_path / "export", kimi, 2**20)
    with HfReader(kimi) as given, HfReader(tmp_path / "export") as exported:
        assert exported.names == given.names
        assert all(torch.equal(exported.read(name), given.read(name)) for name in given.names)
    tokens = torch.arange(6, 30)[None]
    whole, again = (AutoModelForImageTextToText.from_pretrained(path) for path in (kimi, tmp_path / "export"))
    assert torch.equal(whole(input_ids=tokens).logits, again(input_ids=tokens).logits)
