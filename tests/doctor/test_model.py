"""Where a model parts from transformers: real models with one wrong weight, in the policy and in an engine."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_mp.cli.main import main
from grpo_mp.distributed.layout import model_shape
from grpo_mp.doctor.activations import (
    EMBEDDING,
    OUTPUT,
    Activations,
    Recorder,
    attention_point,
    layer_point,
    run_engine,
    run_policy,
    run_transformers,
)
from grpo_mp.doctor.model import compare_keys, diagnose_model, point_errors, random_tokens
from grpo_mp.models.families import FAMILIES
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.utils.findings import Level
from tests.sparse_attention import SPARSE, marked
from tools.tiny.models import make_tiny, make_tokenizer

LAYERS = 3
POINTS = [EMBEDDING, *(point(layer) for layer in range(LAYERS) for point in (attention_point, layer_point))]
IN_ENGINES = ("deepseek_v3", "glm4_moe", "glm_moe_dsa", "kimi_k2", "qwen3_moe")
MakeModel = Callable[[str], Path]


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """A random folder of a family, by name; made once."""
    folders: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            shape = {"num_hidden_layers": LAYERS, "initializer_range": 0.1}
            make_tiny(folders[family], family, make_tokenizer(["apples"]), 1, **shape)
        return folders[family]

    return make


def tokens_of(folder: Path) -> torch.Tensor:
    return random_tokens(HfConfig.read(folder).int("vocab_size"), sequences=2, length=24)


def with_changed(folder: Path, copy: Path, name: str, factor: float) -> Path:
    shutil.copytree(folder, copy)
    file = copy / "model.safetensors"
    weights = load_file(file)
    weights[name] = weights[name] * factor
    save_file(weights, file, {"format": "pt"})
    return copy


@pytest.mark.parametrize("family", marked(FAMILIES))
def test_every_family_is_compared_at_every_point(family: str, make_model: MakeModel) -> None:
    folder = make_model(family)
    tokens = tokens_of(folder)
    reference = run_transformers(folder, tokens, torch.float32)
    policy = run_policy(folder, tokens, "float32")
    assert set(reference.points) == set(policy.points) == set(POINTS)
    errors = point_errors(policy, reference, None, LAYERS)
    assert [each.point for each in errors] == [*POINTS, OUTPUT]
    assert all(each.model.error < 1e-5 for each in errors)
    assert all(each.model.rerouted == 0.0 for each in errors)
    assert set(policy.experts) == set(reference.experts)
    assert bool(policy.experts) == (family not in ("qwen3", "qwen3_5_text", "qwen2", "llama"))
    torch.testing.assert_close(policy.logprobs, reference.logprobs, atol=1e-3, rtol=0)
    assert len(policy.logprobs) == 2 * 23


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("model.layers.1.self_attn.o_proj.weight", "layer 1, after attention"),
        ("model.layers.2.mlp.experts.3.down_proj.weight", "layer 2, after its MLP"),
        ("model.layers.1.mlp.gate.weight", "layer 1, after its MLP"),
        ("lm_head.weight", "final norm and output layer"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_wrong_place_is_named(
    name: str, point: str, dtype: str, make_model: MakeModel, tmp_path: Path
) -> None:
    folder = make_model("deepseek_v3")
    tokens = tokens_of(folder)
    reference = run_transformers(folder, tokens, torch.float32)
    same = None if dtype == "float32" else run_transformers(folder, tokens, getattr(torch, dtype))
    (whole,) = diagnose_model("policy", run_policy(folder, tokens, dtype), reference, same, LAYERS)
    assert whole.level is Level.OK
    changed = with_changed(folder, tmp_path / "changed", name, 3.0)
    (finding,) = diagnose_model("policy", run_policy(changed, tokens, dtype), reference, same, LAYERS)
    assert finding.level is Level.ERROR
    assert finding.sentence.startswith(f"the policy parts from transformers at: {point} (relative error ")


def test_a_value_that_is_not_finite_is_an_error(make_model: MakeModel) -> None:
    folder = make_model("qwen3")
    reference = run_transformers(folder, tokens_of(folder), torch.float32)
    broken = Activations(
        {name: values * float("nan") for name, values in reference.points.items()}, {}, reference.logprobs
    )
    assert diagnose_model("engine", broken, reference, None, LAYERS)[0].level is Level.ERROR
    no_logprobs = Activations(reference.points, {}, reference.logprobs * float("nan"))
    assert diagnose_model("engine", no_logprobs, reference, None, LAYERS)[0].level is Level.ERROR


def test_keys_are_recorded_of_queries_with_a_choice() -> None:
    recorder = Recorder()
    recorder.add_keys(0, torch.tensor([[0, -1], [1, 0], [2, 0]]), 4)
    assert recorder.activations([torch.zeros(1)]).keys[0].tolist() == [[True, False, True, False]]


@pytest.mark.parametrize("family", marked(SPARSE))
def test_keys_of_indexers_are_compared(family: str, make_model: MakeModel, tmp_path: Path) -> None:
    """A query of 22 with 16 or fewer keys has no choice, and the last of a sequence is not compared."""
    folder = make_model(family)
    tokens = tokens_of(folder)
    shape = model_shape(HfConfig.read(folder))
    reference = run_transformers(folder, tokens, torch.float32)
    changed = with_changed(folder, tmp_path / "changed", "model.layers.2.self_attn.indexer.weights_proj.weight", -1.0)
    policies = [run_policy(each, tokens, "float32") for each in (folder, changed)]
    indexed = [0, 2] if family == "glm_moe_dsa" else [0, 1, 2]
    assert {layer: keys.shape for layer, keys in policies[0].keys.items()} == dict.fromkeys(indexed, (2 * 7, 24))
    assert {int(count) for keys in policies[0].keys.values() for count in keys.sum(1)} == {16}
    equal, other = (
        compare_keys({"policy": policy, "transformers": reference}, reference, shape, 24)[0] for policy in policies
    )
    assert equal.level is Level.OK
    assert equal.evidence == [f"layer {layer}: policy and transformers 100.00%" for layer in indexed]
    assert other.level is Level.WARNING
    assert other.evidence[:-1] == equal.evidence[:-1]
    (short,) = compare_keys({}, reference, shape, 17)
    assert short.sentence.endswith("--length above 17")


@pytest.mark.slow
def test_an_engine_with_a_wrong_weight_parts_where_it_is(make_model: MakeModel, tmp_path: Path) -> None:
    """In bfloat16."""
    folder = make_model("qwen3_moe")
    tokens = tokens_of(folder)
    name = "model.layers.1.self_attn.o_proj.weight"
    changed = with_changed(folder, tmp_path / "changed", name, 3.0)
    reference, same = (run_transformers(folder, tokens, dtype) for dtype in (torch.float32, torch.bfloat16))
    engine = run_engine(changed, tokens, "bfloat16")
    (finding,) = diagnose_model("engine", engine, reference, same, LAYERS)
    assert finding.level is Level.ERROR
    assert finding.sentence.startswith("the engine parts from transformers at: layer 1, after attention")


@pytest.mark.slow
@pytest.mark.parametrize("family", marked(IN_ENGINES))
def test_policy_and_engine_agree_with_transformers(
    family: str, make_model: MakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "model", str(make_model(family)), "--dtype", "float32", "--length", "24"]) == 0
    said = capsys.readouterr().out
    assert "ok: the policy computes what transformers does" in said
    assert "ok: the engine computes what transformers does" in said
    assert said.count("layer 2, after its MLP") == 2
    assert said.count("policy and engine 100.00%") == (3 if family in SPARSE else 0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["missing"], "missing"), (["--length", "1"], "--length 1: the model takes 2 to 1024 tokens")],
)
def test_what_cannot_be_run_is_refused(
    arguments: list[str], sentence: str, make_model: MakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = [] if arguments == ["missing"] else [str(make_model("qwen3"))]
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "model", *folder, *arguments])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
