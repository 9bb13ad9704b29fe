"""Every recipe's engine as SGLang starts it on CUDA, up to the first kernel: its own functions, on a CPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.config import Settings, load_settings
from grpo_mp.distributed.ports import claim_ports
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.weight_formats import BLOCKWISE_FP8
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.engine_memory import engine_memory, engine_weight_bytes, state_pool
from grpo_mp.planner.job import make_job
from grpo_mp.planner.model_configs import find_config, published_config
from grpo_mp.rollout.engine_args import DP_ATTENTION_PORTS, ENGINE_SITE, engine_arguments, ports_needed
from grpo_mp.rollout.engine_layout import check_blocks, engine_format, engine_parallelism
from grpo_mp.utils.errors import UserError
from tests.planner.jobs import job_of, settings_of
from tests.recipes import RL
from tests.rollout.specs import first_engine
from tests.rollout.start_on_meta import CACHES, GIB
from tools.tiny.models import make_tiny, make_tokenizer

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = [path.stem for path in RL if path.stem not in ("tiny_tools", "tiny_repositories")]
pytestmark = pytest.mark.slow


Facts = dict[str, dict[str, Any]]
# model, engine.gpus_per_engine and engine.speculative
DRAFTS: list[tuple[str, int, dict[str, Any]]] = [
    ("deepseek-r1", 16, {"algorithm": "mtp"}),
    ("glm-4.5", 8, {"algorithm": "mtp", "num_steps": 4}),
    ("qwen3-next-80b-a3b", 4, {"algorithm": "mtp"}),
    ("qwen3.5-35b-a3b", 4, {"algorithm": "mtp"}),
    ("qwen3-30b-a3b", 8, {"algorithm": "ngram", "num_steps": 7}),
]
# model, engine.gpus_per_engine and engine.args: some that blocks of 128 allow, some that they do not
PARALLELISMS: list[tuple[str, int, dict[str, Any]]] = [
    ("moonlight-16b-a3b", 4, {"ep_size": 4, "attn_dp_size": 4}),
    ("moonlight-16b-a3b", 2, {"ep_size": 2, "attn_dp_size": 2}),
    ("glm-4.5", 8, {"ep_size": 8}),
    ("qwen2.5-7b", 4, {}),
    ("qwen3.5-35b-a3b", 8, {"ep_size": 8}),
]
LINEAR = "qwen3.5-35b-a3b"
# engine.args and engine.speculative of a model with linear attention
STATES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"disable_overlap_schedule": True, "attn_dp_size": 2}, {}),
    ({"mamba_radix_cache_strategy": "extra_buffer_lazy", "mamba_ssm_dtype": "bfloat16"}, {}),
    ({"disable_radix_cache": True, "mamba_full_memory_ratio": 2.0}, {}),
    ({"disable_radix_cache": True, "max_running_requests": 300}, {}),
    ({"max_mamba_cache_size": 500, "attn_dp_size": 2}, {}),
    ({"max_running_requests": 100}, {"algorithm": "ngram", "num_steps": 3}),
]
WINDOWED = "gpt-oss-20b"
# engine.args of a model with sliding windows
POOLS: list[dict[str, Any]] = [{}, {"swa_full_tokens_ratio": 0.25}, {"disable_hybrid_swa_memory": True}]


def cuda_arguments(settings: Settings, hf: HfConfig, folder: Path) -> dict[str, Any]:
    """Return the arguments of the run's first engine."""
    spec = first_engine(settings, hf, folder)
    claim = claim_ports(ports_needed(spec))
    claim.release()
    dist_init_addr = f"127.0.0.1:{claim.port + 1}" if spec.nodes > 1 else None
    return engine_arguments(spec, claim.port, "name", "key", dist_init_addr)


def run_module(name: str, cases: dict[str, dict[str, Any]]) -> Any:
    """What a module of this folder says of each case, in a process of its own."""
    path = f"{ENGINE_SITE}:{Path(__file__).parents[2]}"
    command = [sys.executable, "-P", "-W", "ignore", "-m", f"tests.rollout.{name}"]
    process = subprocess.run(
        command,
        input=json.dumps(cases),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def facts_by_case(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """SGLang's facts about every recipe, parallelism, way of drafting, pool of states and pool of windows."""
    folder = tmp_path_factory.mktemp("models")
    cases = {}
    for name in RECIPES:
        settings = load_settings(CONFIGS / f"{name}.yaml")
        hf = make_tiny_deepseek(folder / "checkpoint") if name == "tiny_moe" else find_config(settings.model.path)[0]
        cases[name] = cuda_arguments(settings, hf, folder / name)
    for number, (model, gpus, args) in enumerate(PARALLELISMS):
        engine = {"gpus_per_engine": gpus, "args": {"quantization": "fp8", **args}}
        name = f"parallelism {number}"
        cases[name] = cuda_arguments(settings_of(engine=engine), published_config(model), folder / name)
    for number, (model, gpus, speculative) in enumerate(DRAFTS):
        settings = settings_of(engine={"gpus_per_engine": gpus, "speculative": speculative})
        name = f"draft {number}"
        cases[name] = cuda_arguments(settings, published_config(model), folder / name)
    for number, (args, speculative) in enumerate(STATES):
        settings = settings_of(engine={"gpus_per_engine": 4, "args": args, "speculative": speculative})
        name = f"states {number}"
        cases[name] = cuda_arguments(settings, published_config(LINEAR), folder / name)
    for number, args in enumerate(POOLS):
        settings = settings_of(engine={"gpus_per_engine": 2, "args": args})
        name = f"pools {number}"
        cases[name] = cuda_arguments(settings, published_config(WINDOWED), folder / name)
    facts: Facts = run_module("start_on_meta", cases)
    return facts


def make_tiny_deepseek(folder: Path) -> HfConfig:
    make_tiny(folder, "deepseek_v3", make_tokenizer(["apples"]))
    return HfConfig.read(folder)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_starts(facts_by_case: Facts, name: str) -> None:
    facts = facts_by_case[name]
    assert "error" not in facts, facts["error"]
    assert facts["backends"] == ["FullCudaGraphBackend"]  # of decode: prefill has none
    assert facts["load_format"] == "dummy"
    assert facts["enable_memory_saver"]
    assert facts["sleep_on_idle"] == (facts["attn_dp_size"] == 1)
    claimed = range(facts["port"], facts["port"] + 1 + (DP_ATTENTION_PORTS if facts["attn_dp_size"] > 1 else 1))
    assert set(facts["ports"]) <= set(claimed)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "tiny_moe"])
def test_a_recipe_is_sharded_and_quantized_as_planned(facts_by_case: Facts, name: str) -> None:
    """The planner counts a GPU's weights from the parameter mapping, SGLang allocates them."""
    settings = load_settings(CONFIGS / f"{name}.yaml")
    facts = facts_by_case[name]
    hf, _ = find_config(settings.model.path)
    parallelism = engine_parallelism(settings.engine.gpus_per_engine, settings.engine.args, hf)
    assert facts["attn_dp_size"] == parallelism.replicas
    assert facts["attn_tp_size"] == parallelism.attention_tensor
    assert facts["moe_ep_size"] == parallelism.expert
    assert (facts["fp8_matrices"] > 0) == bool(engine_format(settings.engine.args, hf, cpu=False))
    batch_script = (CONFIGS.parent / "launch" / f"{name}.sh").read_text()
    nodes = int(re.findall(r"#SBATCH .*--nodes=(\d+)", batch_script)[0])
    job = make_job(settings, hf, read_cluster("h100-80"), nodes)
    assert facts["bytes"] == pytest.approx(engine_weight_bytes(job), rel=0.01)


@pytest.mark.parametrize("number", range(len(DRAFTS)), ids=lambda number: DRAFTS[number][0])
def test_an_engine_drafts_as_it_is_set(facts_by_case: Facts, number: int) -> None:
    speculative = DRAFTS[number][2]
    facts = facts_by_case[f"draft {number}"]
    assert "error" not in facts, facts["error"]
    settings = settings_of(engine={"speculative": speculative})
    assert facts["max_running_requests"] == settings.rollout.prompts_per_step * settings.rollout.group_size
    assert facts["speculative_num_draft_tokens"] == settings.engine.speculative.verified_tokens
    assert facts["speculative_eagle_topk"] == 1
    assert facts["speculative_accept_threshold_single"] == facts["speculative_accept_threshold_acc"] == 1
    if speculative["algorithm"] == "ngram":
        assert (facts["speculative_algorithm"], facts["draft"]) == ("NGRAM", "NoneType")
        return
    assert (facts["speculative_algorithm"], facts["speculative_draft_load_format"]) == ("EAGLE", "auto")
    assert facts["draft"].endswith(("ForCausalLMNextN", "ForCausalLMMTP"))
    assert (facts["speculative_draft_model_path"] or f"draft {number}").endswith(f"draft {number}")  # None: the model's
    assert facts["speculative_num_steps"] == settings.engine.speculative.num_steps
    assert facts["enable_draft_weights_cpu_backup"]
    assert 0 < facts["draft_bytes"] < facts["bytes"] / 8
    target, draft = facts["synced"]  # of a layer that is trained: the model itself passes over what it is sent
    assert not target["loaded"]
    assert [name for name in draft["others"] if not name.endswith(("embed_tokens.weight", "head.weight"))] == []
    assert any("experts" in name for name in draft["loaded"])


@pytest.mark.parametrize("number", range(len(STATES)))
def test_states_of_linear_attention_take_what_the_plan_says(facts_by_case: Facts, number: int) -> None:
    """SGLang's own division of memory between states and KV cache."""
    args, speculative = STATES[number]
    facts = facts_by_case[f"states {number}"]
    assert "error" not in facts, facts["error"]
    job = job_of(LINEAR, "h100-80", 1, engine={"gpus_per_engine": 4, "args": args, "speculative": speculative})
    sequences, gibibytes = facts["states"]
    size, planned_sequences = state_pool(job, CACHES * GIB)
    assert planned_sequences == sequences
    assert size / GIB == pytest.approx(gibibytes, rel=1e-6)


@pytest.mark.parametrize("number", range(len(POOLS)))
def test_caches_of_windows_take_what_the_plan_says(facts_by_case: Facts, number: int) -> None:
    """SGLang's own division of memory between layers with a window and without."""
    facts = facts_by_case[f"pools {number}"]
    assert "error" not in facts, facts["error"]
    job = job_of(WINDOWED, "h100-80", 1, engine={"gpus_per_engine": 2, "args": POOLS[number]})
    planned = engine_memory(job).bytes_per_token
    token = 2 * 4 * 64 * 2  # bytes in one layer: keys and values of half of 8 heads of 64, in bfloat16
    if POOLS[number].get("disable_hybrid_swa_memory"):
        assert (facts["pools"], planned) == ([], 24 * token)
        return
    full, windowed = facts["pools"]
    assert planned == pytest.approx(CACHES * GIB / full, rel=1e-5)
    assert 12 * token * (full + windowed) == pytest.approx(CACHES * GIB, rel=1e-5)


@pytest.mark.parametrize(
    "number", range(len(PARALLELISMS)), ids=lambda number: "-".join(map(str, PARALLELISMS[number][:2]))
)
def test_a_parallelism_is_refused_where_sglang_refuses_it(facts_by_case: Facts, number: int) -> None:
    model, gpus, args = PARALLELISMS[number]
    error = facts_by_case[f"parallelism {number}"].get("error")
    assert error is None or "is not divisible by weight quantization block" in error, error
    refusal = refusal_of(gpus, args, published_config(model))
    assert bool(refusal) == bool(error), f"here: {refusal}; SGLang: {error}"


def refusal_of(gpus: int, args: dict[str, Any], hf: HfConfig) -> str:
    try:
        check_blocks(engine_parallelism(gpus, args, hf), hf, BLOCKWISE_FP8)
    except UserError as refusal:
        return str(refusal)
    return ""
