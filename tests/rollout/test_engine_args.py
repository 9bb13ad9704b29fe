"""What a server is started with, without starting one."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.planner.model_configs import named_config
from grpo_mp.rollout.engine_args import (
    CPU_DEFAULTS,
    DEFAULTS,
    ENGINE_SITE,
    RESERVED,
    EngineSpec,
    check_arguments,
    cuda_defaults,
    engine_arguments,
    engine_environment,
)
from grpo_mp.rollout.engine_layout import EnginePlacement
from grpo_mp.rollout.engine_main import ARGUMENTS
from grpo_mp.rollout.reward_servers import server_spec
from grpo_mp.rollout.rollout import base_spec
from grpo_mp.rollout.sglang_source import argument_names, source_folder
from grpo_mp.utils.section import ServedModelConfig
from tests.planner.jobs import settings_of
from tests.rollout.specs import cuda_spec

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
