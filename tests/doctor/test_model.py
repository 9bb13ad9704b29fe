"""Where a model parts from transformers: real models with one wrong weight, in the policy and in an engine."""

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_mp.checkpoint.hf_reader import HfReader
from grpo_mp.cli.main import main
from grpo_mp.doctor.activations import OUTPUT, Activations, point_names, run_engine, run_policy, run_transformers
from grpo_mp.doctor.compare_models import fp8_folders
from grpo_mp.doctor.model import diagnose_model, expert_agreement, point_errors, random_tokens
from grpo_mp.doctor.weights import check_engine_weights, check_policy_weights, params_of
from grpo_mp.models.families import FAMILIES
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.utils.findings import Finding, Level
from tools.tiny.models import make_tiny, make_tokenizer

LAYERS = 3
POINTS = point_names(LAYERS)
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
    """Copy a folder, with the weight of one tensor scaled."""
    shutil.copytree(folder, copy)
    file = copy / "model.safetensors"
    weights = load_file(file)
    weights[name] = weights[name] * factor
    save_file(weights, file, {"format": "pt"})
    return copy


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_compared_at_every_point(family: str, make_model: MakeModel) -> None:
    folder = make_model(family)
    tokens = tokens_of(folder)
    reference = run_transformers(folder, tokens, torch.float32)
    policy = run_policy(folder, tokens, "float32")
    assert set(reference.points) == set(policy.points) == set(POINTS)
    errors = point_errors(policy, reference, None, LAYERS)
    assert [each.point for each in errors] == [*POINTS, OUTPUT]
    assert all(each.model.error < 1e-5 for each in errors)
    assert set(expert_agreement(policy, reference).values()) <= {1.0}
    assert set(policy.experts) == set(reference.experts)
    assert bool(policy.experts) == (family not in ("qwen3", "qwen2", "llama"))
    torch.testing.assert_close(policy.logprobs, reference.logprobs, atol=1e-3, rtol=0)
    assert len(policy.logprobs) == 2 * 23


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("model.embed_tokens.weight", "embedding"),
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


def test_experts_that_differ_are_counted() -> None:
    def chosen(*rows: list[int]) -> Activations:
        return Activations({}, {1: torch.tensor(rows)}, torch.zeros(0))

    assert expert_agreement(chosen([0, 1], [2, 3]), chosen([1, 0], [2, 5])) == {1: 0.75}


def test_a_value_that_is_not_finite_is_an_error(make_model: MakeModel) -> None:
    folder = make_model("qwen3")
    reference = run_transformers(folder, tokens_of(folder), torch.float32)
    broken = Activations(
        {name: values * float("nan") for name, values in reference.points.items()}, {}, reference.logprobs
    )
    assert diagnose_model("engine", broken, reference, None, LAYERS)[0].level is Level.ERROR
    no_logprobs = Activations(reference.points, {}, reference.logprobs * float("nan"))
    assert diagnose_model("engine", no_logprobs, reference, None, LAYERS)[0].level is Level.ERROR


def test_a_weight_that_the_policy_holds_otherwise_is_named(make_model: MakeModel, tmp_path: Path) -> None:
    """The folder has another value than the one that was loaded, in one element of one expert, and of the embedding."""
    folder = make_model("deepseek_v3")
    found = list[Finding]()
    expert, embedding = "model.layers.2.mlp.experts.3.up_proj.weight", "model.embed_tokens.weight"
    changed = with_changed(folder, tmp_path / "one", expert, 1.5)

    def examine(tensors: Mapping[str, torch.Tensor]) -> None:
        for other in (folder, changed, with_changed(changed, tmp_path / "two", embedding, 1.5)):
            found.append(check_policy_weights(other, tensors, params_of(folder)))

    run_policy(folder, tokens_of(folder), "bfloat16", examine)
    assert [finding.level for finding in found] == [Level.OK, Level.ERROR, Level.ERROR]
    assert found[1].sentence.startswith(f"the policy holds other weights than the folder, first {expert}: up to ")
    assert f"first {embedding}: up to " in found[2].sentence
    assert found[2].evidence[0].startswith("2 of ")


def test_a_tensor_that_the_export_changes_is_named() -> None:
    loaded = {"layer.0.qkv": "1", "layer.0.mlp": "2", "layer.1.qkv": "3"}
    assert check_engine_weights(loaded, loaded).level is Level.OK
    finding = check_engine_weights(loaded, loaded | {"layer.1.qkv": "4", "layer.0.mlp": "5"})
    assert finding.sentence.endswith("first layer.0.mlp")
    assert finding.evidence == ["2 tensors differ", "layer.0.mlp", "layer.1.qkv"]


def cast_block(block: torch.Tensor) -> torch.Tensor:
    scale = block.abs().max() / 448
    return (block / scale).to(torch.float8_e4m3fn).float() * scale


def test_fp8_rounds_what_releases_quantize(make_model: MakeModel, tmp_path: Path) -> None:
    """Against torch's own cast, block by block; norms, embedding, output layer and router stay."""
    folder = make_model("deepseek_v3")
    rounded, same = fp8_folders(folder, tmp_path)
    assert rounded == same
    before, after = load_file(folder / "model.safetensors"), HfReader(rounded)
    assert set(after.names) == set(before)
    for name, values in before.items():
        expected = values.float()
        if values.ndim == 2 and not re.search(r"embed_tokens|lm_head|mlp\.gate\.", name):
            rows = [[cast_block(block) for block in row.split(128, 1)] for row in expected.split(128)]
            expected = torch.cat([torch.cat(row, 1) for row in rows])
            assert not torch.equal(expected, values.float())
        actual = after.read(name)
        torch.testing.assert_close(actual.float(), expected.to(actual.dtype).float(), rtol=0.01, atol=0)


@pytest.mark.slow
def test_an_engine_with_a_wrong_weight_parts_where_it_is(make_model: MakeModel, tmp_path: Path) -> None:
    """In bfloat16; the engine also says which tensor the export of the right policy changes."""
    folder = make_model("qwen3_moe")
    tokens = tokens_of(folder)
    name = "model.layers.1.self_attn.o_proj.weight"
    changed = with_changed(folder, tmp_path / "changed", name, 3.0)
    reference, same = (run_transformers(folder, tokens, dtype) for dtype in (torch.float32, torch.bfloat16))
    engine, checksums = run_engine(changed, tokens, "bfloat16", export=folder)
    (finding,) = diagnose_model("engine", engine, reference, same, LAYERS)
    assert finding.level is Level.ERROR
    assert finding.sentence.startswith("the engine parts from transformers at: layer 1, after attention")
    assert checksums is not None
    weights = check_engine_weights(checksums.loaded, checksums.exported)
    assert (weights.level, weights.evidence) == (Level.ERROR, ["1 tensors differ", name])


@pytest.mark.slow
def test_fp8_is_measured_by_weights_that_went_there_and_back(
    make_model: MakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "model", str(make_model("deepseek_v3")), "--dtype", "fp8", "--length", "24"]) == 0
    said = capsys.readouterr().out
    assert "ok: the engine computes what transformers does" in said
    assert "ok: the policy holds the folder's" in said
    own = {
        name: float(line.split()[-1])
        for name in ("policy", "engine")
        for line in re.findall(rf"^ +{name} .*\n.*\n.*\n +(layer 0, after its MLP .*)$", said, re.MULTILINE)
    }
    assert own["engine"] > 2 * own["policy"]  # FP8 has three bits of mantissa, bfloat16 seven


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "kimi_k2", "qwen3_moe"])
def test_policy_and_engine_agree_with_transformers(
    family: str, make_model: MakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "model", str(make_model(family)), "--dtype", "float32", "--length", "24"]) == 0
    said = capsys.readouterr().out
    assert "ok: the policy holds the folder's" in said
    assert re.search(r"ok: the engine's \d+ tensors are those of the policy's export", said)
    assert "ok: the policy computes what transformers does" in said
    assert "ok: the engine computes what transformers does" in said
    assert said.count("layer 2, after its MLP") == said.count("layer 2, experts alike") == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["missing"], "missing"),
        (["--length", "1"], "--length 1: the model takes 2 to 1024 tokens"),
        (["--without", "policy", "--without", "engine"], "nothing is left to compare: leave out one of them"),
        (["--length", "5000"], "--length 5000: the model takes 2 to 1024 tokens"),
    ],
)
def test_what_cannot_be_run_is_refused(
    arguments: list[str], sentence: str, make_model: MakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = [] if arguments == ["missing"] else [str(make_model("qwen3"))]
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "model", *folder, *arguments])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
