"""What a server is started with, also in blockwise FP8, and what is refused; without starting one."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.checkpoint.hf_writer import FP8_CONFIG
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.weight_formats import FORMATS, INT4
from grpo_mp.planner.model_configs import named_config, published_config
from grpo_mp.rollout.engine_args import (
    CPU_DEFAULTS,
    DEFAULTS,
    ENGINE_SITE,
    RESERVED,
    RETURN_KEYS,
    EngineSpec,
    check_arguments,
    check_sparse_attention,
    cuda_defaults,
    engine_arguments,
    engine_environment,
)
from grpo_mp.rollout.engine_layout import (
    OVERRIDES,
    EnginePlacement,
    check_blocks,
    check_dtype,
    check_kernels,
    engine_format,
    engine_parallelism,
    precision_arguments,
)
from grpo_mp.rollout.engine_main import ARGUMENTS
from grpo_mp.rollout.reward_servers import server_spec
from grpo_mp.rollout.rollout import base_spec
from grpo_mp.rollout.sglang_source import argument_names, source_folder
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.section import ServedModelConfig
from tests.planner.jobs import settings_of
from tests.rollout.specs import cuda_spec
from tools.tiny.models import make_tiny, make_tokenizer

SPEC = EngineSpec(index=0, rank=0, model=Path("m"), dtype="bfloat16", context_tokens=100, gpus=8, first_gpu=4)
CPU = EngineSpec(index=0, rank=0, model=Path("m"), dtype="float32", context_tokens=100, cpu=True)
DISABLED = "SGLANG_DISABLED_MODEL_ARCHS"
ASK_SGLANG = """
import inspect, json
from sglang.srt.server_args import ServerArgs
print(json.dumps(list(inspect.signature(ServerArgs).parameters)))
"""


def test_names_read_from_source_are_those_of_the_installed_sglang(tmp_path: Path) -> None:
    environment = engine_environment(CPU, {}, str(tmp_path), {})
    command = [sys.executable, "-c", ASK_SGLANG]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300).stdout
    assert argument_names() == set(json.loads(output.splitlines()[-1]))


def test_every_argument_is_known_to_sglang() -> None:
    for spec in (SPEC, CPU):
        assert set(engine_arguments(spec, 1, "name", "key")) <= argument_names()
    assert set(RESERVED) <= argument_names()
    assert not set(RESERVED) & {*DEFAULTS, *CPU_DEFAULTS}


def test_the_users_arguments_win_over_defaults_only() -> None:
    spec = replace(CPU, args={"attention_backend": "triton", "max_running_requests": 10})
    arguments = engine_arguments(spec, 1, "name", "key")
    assert arguments["attention_backend"] == "triton"
    assert arguments["max_total_tokens"] == 10 * arguments["context_length"]
    assert arguments["max_mamba_cache_size"] == 40  # otherwise most of the host's memory
    assert (arguments["port"], arguments["nccl_port"], arguments["device"]) == (1, 2, "cpu")


def test_an_engine_over_nodes_and_gpus() -> None:
    fields: dict[str, Any] = {"gpus": 16, "nodes": 2, "node_rank": 1}
    spec = replace(SPEC, rank=8, **fields)
    arguments = engine_arguments(spec, 1, "name", "key", "10.0.0.1:7000")
    assert arguments["tp_size"] == 16
    assert (arguments["nnodes"], arguments["node_rank"]) == (2, 1)
    assert arguments["dist_init_addr"] == "10.0.0.1:7000"
    assert arguments["enable_memory_saver"] is True
    assert engine_arguments(SPEC, 1, "name", "key")["base_gpu_id"] == 4


@pytest.mark.parametrize("fp32_head", [True, False])
def test_an_engine_rounds_its_logits_as_the_policy_does(fp32_head: bool) -> None:
    settings = settings_of(model={"path": "m", "fp32_head": fp32_head})
    spec = cuda_spec(settings, named_config("Qwen3-30B-A3B"), EnginePlacement(0, 0, 0, 1))
    teacher = server_spec(ServedModelConfig(path="m"), base_spec(settings.model, 96, 0, 0), has_head=False)
    assert teacher
    for each in (spec, teacher):
        assert engine_arguments(each, 1, "name", "key")["enable_fp32_lm_head"] is fp32_head


@pytest.mark.parametrize("spec", [SPEC, CPU])
def test_environment(spec: EngineSpec) -> None:
    parent = {
        "RANK": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "HOME": "/h",
        "PYTHONPATH": "/mine",
        "no_proxy": "x.org",
    }
    environment = engine_environment(spec, {"port": 5}, "/scratch", parent)
    assert json.loads(environment[ARGUMENTS]) == {"port": 5}
    assert not {"RANK", "TORCHELASTIC_USE_AGENT_STORE"} & set(environment)
    assert environment["HOME"] == "/h"
    assert environment["TMPDIR"] == "/scratch"
    assert environment["no_proxy"] == "x.org,127.0.0.1,localhost"
    path = environment["PYTHONPATH"].split(":")
    assert path[-1] == "/mine"
    assert (path[0] == str(ENGINE_SITE)) is spec.cpu
    assert ("SGLANG_USE_CPU_ENGINE" in environment) is spec.cpu


@pytest.mark.parametrize(
    ("architecture", "module"),
    [
        ("DeepseekV3ForCausalLM", "deepseek_v2"),
        ("Qwen2ForRewardModel", "qwen2_rm"),
    ],
)
def test_an_engine_imports_the_module_of_its_model_alone(architecture: str, module: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}), encoding="utf-8")
    disabled = engine_environment(replace(CPU, model=tmp_path), {}, str(tmp_path), {})[DISABLED].split(",")
    package = importlib.util.find_spec("sglang")
    assert package
    assert package.submodule_search_locations
    modules = {file.stem for file in Path(package.submodule_search_locations[0], "srt", "models").glob("*.py")}
    assert modules - set(disabled) == {module}
    assert set(disabled) < modules


def test_ranks_of_an_engine_agree_on_the_token(tmp_path: Path) -> None:
    """SGLang reads the variable under this name."""
    name = "SYNC_TOKEN_IDS_ACROSS_TP"
    assert f'{name} = get_bool_env_var("{name}")' in (source_folder() / "layers" / "sampler.py").read_text()
    for gpus in (1, 2):
        assert engine_environment(replace(CPU, gpus=gpus), {}, str(tmp_path), {})[name] == str(gpus > 1).lower()


def test_kernels_return_positions_of_keys_where_an_engine_returns_them(tmp_path: Path) -> None:
    fused = "SGLANG_DSA_FUSE_TOPK"
    assert engine_environment(SPEC, {RETURN_KEYS: True}, str(tmp_path), {fused: "true"})[fused] == "false"
    assert fused not in engine_environment(SPEC, {}, str(tmp_path), {})


def test_engines_on_gpus_outlast_a_compilation_and_capture_graphs_for_what_is_in_flight(tmp_path: Path) -> None:
    environment = engine_environment(SPEC, {}, str(tmp_path), {})
    assert environment["SGLANG_JIT_DEEPGEMM_PRECOMPILE"] == "false"
    assert environment["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "false"
    own = {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "true"}
    assert engine_environment(SPEC, {}, str(tmp_path), own)["SGLANG_JIT_DEEPGEMM_PRECOMPILE"] == "true"
    assert "SGLANG_JIT_DEEPGEMM_PRECOMPILE" not in engine_environment(CPU, {}, str(tmp_path), {})
    assert cuda_defaults({}, 96, 7200.0) == {"watchdog_timeout": 7200.0, "cuda_graph_max_bs_decode": 144}
    assert cuda_defaults({}, 512, 600.0) == {"watchdog_timeout": 600.0}
    assert cuda_defaults({"attn_dp_size": 32}, 3072, 600.0)["cuda_graph_max_bs_decode"] == 144
    check_arguments(cuda_defaults({}, 96, 7200.0))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, HfConfig]:
    """One folder of wide weights, and one whose config says blockwise FP8."""
    folders = {}
    for fp8 in (False, True):
        folder = tmp_path_factory.mktemp("fp8" if fp8 else "wide")
        make_tiny(folder, "qwen3_moe", make_tokenizer(["apples"]), num_hidden_layers=1)
        if fp8:
            config = json.loads((folder / "config.json").read_text()) | {"quantization_config": FP8_CONFIG}
            (folder / "config.json").write_text(json.dumps(config))
        folders[fp8] = HfConfig.read(folder)
    return folders


READ_CONFIGS = """
import json, sys
from sglang.srt.configs.model_config import ModelConfig
requests = json.loads(sys.argv[1])
configs = [ModelConfig(folder, model_override_args=overrides).hf_config.to_dict() for folder, overrides in requests]
print(json.dumps([[config.get("quantization_config"), config["rope_theta"]] for config in configs]))
"""
CASES: list[tuple[bool, dict[str, Any], bool, bool]] = [  # folder in FP8, engine.args, on a CPU -> engine in FP8
    (False, {}, False, False),
    (False, {"quantization": "fp8"}, False, True),
    (True, {}, False, True),
    (True, {"quantization": "fp8"}, False, True),
    (True, {}, True, False),
    (False, {}, True, False),
]


def test_sglang_reads_the_intended_precision(folders: dict[bool, HfConfig]) -> None:
    user = {OVERRIDES: '{"rope_theta": 7.0}'}
    args_of_cases = [user | precision_arguments(user | args, folders[fp8], cpu) for fp8, args, cpu, _ in CASES]
    requests = [
        [str(folders[case[0]].path), arguments[OVERRIDES]] for case, arguments in zip(CASES, args_of_cases, strict=True)
    ]
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(ENGINE_SITE)}
    command = [sys.executable, "-P", "-W", "ignore", "-c", READ_CONFIGS, json.dumps(requests)]
    process = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    results = json.loads(process.stdout.splitlines()[-1])
    for (folder_fp8, args, cpu, expected), arguments, (quantized, theta) in zip(
        CASES, args_of_cases, results, strict=True
    ):
        assert bool(engine_format(args, folders[folder_fp8], cpu)) == expected
        assert (quantized or {}).get("weight_block_size") == ([128, 128] if expected else None)
        assert theta == 7.0
        assert (arguments != user) == (expected != folder_fp8)


def test_unsupported_precision_is_refused(folders: dict[bool, HfConfig]) -> None:
    with pytest.raises(
        UserError, match=r"^engine\.args\.quantization=awq: weights are sent as they are trained, or in"
    ):
        engine_format({"quantization": "awq"}, folders[False], cpu=False)
    with pytest.raises(UserError, match=r"engines compute in blockwise FP8 on GPUs only: leave it out"):
        engine_format({"quantization": "fp8"}, folders[False], cpu=True)


@pytest.mark.parametrize(
    ("args", "capability", "words"),
    [
        ({"quantization": "mxfp8"}, 9.0, "MXFP8 on Blackwell GPUs (compute capability 10), and these have 9"),
        ({"quantization": "mxfp8", "moe_runner_backend": "deep_gemm"}, 10.0, "kernels: set flashinfer_trtllm, "),
        ({"quantization": "compressed-tensors", "moe_runner_backend": "triton"}, 9.0, "kernels: set marlin, or leave"),
        ({"quantization": "compressed-tensors"}, 10.3, "SGLang selects Triton kernels"),
        ({"quantization": "compressed-tensors", "moe_a2a_backend": "deepep"}, 9.0, "leave moe_a2a_backend out"),
        ({"quantization": "mxfp8"}, 10.0, ""),
        ({"quantization": "compressed-tensors"}, 9.0, ""),
        ({"quantization": "compressed-tensors", "moe_runner_backend": "marlin"}, 10.3, ""),
    ],
    ids=str,
)
def test_kernels_that_cannot_load_new_weights_are_refused(args: dict[str, Any], capability: float, words: str) -> None:
    form = FORMATS[args["quantization"]]
    context = pytest.raises(UserError, match=re.escape(words)) if words else nullcontext()
    with context:
        check_kernels(args, form, capability)


@pytest.mark.parametrize(
    ("name", "args", "what"),
    [
        ("qwen3-30b-a3b", {"quantization": "fp8"}, "weights in blockwise FP8"),
        ("qwen3-30b-a3b", {"moe_a2a_backend": "deepep"}, "experts of engine.args.moe_a2a_backend=deepep"),
        ("gpt-oss-20b", {}, "gpt_oss"),
        ("qwen3-30b-a3b", {"moe_a2a_backend": "none"}, ""),
    ],
    ids=str,
)
def test_engines_that_compute_in_bfloat16_only_refuse_float16(name: str, args: dict[str, Any], what: str) -> None:
    hf = published_config(name)
    form = engine_format(args, hf, cpu=False)
    check_dtype("bfloat16", args, hf, form)
    sentence = re.escape(f"model.dtype=float16: SGLang computes {what} in bfloat16 only")
    with pytest.raises(UserError, match=sentence) if what else nullcontext():
        check_dtype("float16", args, hf, form)


def test_formats_that_do_not_fit_the_model_are_refused() -> None:
    dense = published_config("qwen3-8b")
    moe = published_config("qwen3-30b-a3b")
    with pytest.raises(UserError, match="only routed experts are sent in INT4, and qwen3 has none"):
        engine_format({"quantization": "compressed-tensors"}, dense, cpu=False)
    check_blocks(engine_parallelism(8, {}, moe), moe, INT4)  # 96 columns of each expert are three groups
    with pytest.raises(UserError, match=r"over 16 GPUs of an engine 48 each, .* of the 32 of a block in INT4"):
        check_blocks(engine_parallelism(16, {}, moe), moe, INT4)


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        (
            {"args": {"attention_backend": "fa3"}},
            "args.attention_backend=fa3: only dsa computes .*: leave it out",
        ),
        ({"args": {"decode_attention_backend": "flashmla"}}, "args.decode_attention_backend=flashmla: only dsa"),
        ({"args": {"quantization": "mxfp8"}}, "args.quantization=mxfp8: SGLang misreads its scales .*: set fp8"),
        ({"deterministic": True}, "engine.deterministic=true: .* set false, or use engines on CPUs"),
    ],
)
def test_sparse_attention_is_left_to_its_backend(engine: dict[str, Any], sentence: str) -> None:
    dense = published_config("deepseek-r1")
    sparse = replace(dense, values=dense.values | {"index_topk": 2048})
    settings = settings_of(engine=engine).engine
    with pytest.raises(UserError, match=sentence):
        check_sparse_attention(settings, sparse, cpu=False)
    check_sparse_attention(settings, sparse, cpu=True)
    check_sparse_attention(settings, dense, cpu=False)
    check_sparse_attention(settings_of(engine={"args": {"attention_backend": "dsa"}}).engine, sparse, cpu=False)
