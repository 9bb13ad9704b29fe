"""`grpo-mp plan`: every recipe fits its machines; bad input is one sentence; a search finds what fits."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml

from grpo_mp.config import load_settings
from grpo_mp.planner.clusters import PROFILES, read_cluster
from grpo_mp.planner.job import make_job
from grpo_mp.planner.memory import total_bytes
from grpo_mp.planner.model_configs import find_config
from grpo_mp.planner.plan import check_fits, make_plan
from grpo_mp.rollout.engine_args import check_arguments
from grpo_mp.utils.phases import GIB
from tests.cli.command import Result, run_command
from tests.planner.meta_model import check_parameter_counts
from tests.recipes import FULL_SIZE
from tests.sparse_attention import IS_COMPUTED, is_sparse
from tools.tiny.models import make_tiny, make_tokenizer

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"grpo-mp plan (\S+) --cluster (\S+) --nodes (\d+)")
Plan = Callable[..., Result]
MANY_STAGES = (
    "kimi_k2",
    "kimi_k2_5_128x_h200",
    "deepseek_r1_512x_h100",
    "deepseek_r1_96x_h20",
    "deepseek_r1_64x_h200",
    "deepseek_r1_64x_h100",
)  # built one by one
RECIPES = FULL_SIZE


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem in MANY_STAGES)) for path in RECIPES],
    ids=lambda path: path.stem,
)
def test_recipe_fits_the_machines_in_its_comment(path: Path) -> None:
    """Every phase leaves 6 GiB of a device, and 100 GB of hosts of 1 TB."""
    command = COMMAND.search(path.read_text())
    assert command
    assert Path(command[1]).name == path.name
    settings = load_settings(path)
    check_arguments(settings.engine.args)
    hf, _ = find_config(settings.model.path)
    job = make_job(settings, hf, read_cluster(command[2]), int(command[3]))
    if not is_sparse(path) or IS_COMPUTED:
        check_parameter_counts(job)
    plan = make_plan(job)
    assert check_fits(plan).fits
    devices = [total_bytes(sizes) for stage in plan.memory.device for sizes in stage.values()]
    assert max(devices) <= job.cluster.gpu_bytes - 6 * GIB
    assert max(total_bytes(sizes) for sizes in plan.memory.host.values()) <= 900e9
    machines = f"{job.world_size} x {command[2]} | {max(devices) / GIB:.0f} of {job.cluster.gpu_bytes / GIB:.0f}"
    row = f"| `{path.stem}` | {settings.model.path.name} | {machines} | {plan.step_s:,.0f} |"
    assert row in (ROOT / "configs/README.md").read_text().splitlines()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_latent_cache_in_fp8_is_read_as_it_is(path: Path) -> None:
    """SGLang's fa3 would copy the whole cache to bfloat16 for each layer of each decode step."""
    settings = load_settings(path)
    hf, _ = find_config(settings.model.path)
    if hf.get("kv_lora_rank") and "fp8" in str(settings.engine.args.get("kv_cache_dtype")):
        assert settings.engine.args["attention_backend"] == "flashmla"


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    monkeypatch.chdir(ROOT)
    return partial(run_command, capsys, "plan")


def test_plan_says_whether_it_fits(plan: Plan) -> None:
    result = plan("configs/moe_671b.yaml", "--nodes", "16")
    assert result.status == 0, result.err
    assert "16 x 8 x h100-80: fits. rank" in result.out
    assert "the published DeepSeek-R1" in result.out
    assert "multi-token-prediction layer is not part of the policy" in result.out


def test_tiny_recipe_is_planned_from_its_generated_model(plan: Plan, tmp_path: Path) -> None:
    make_tiny(tmp_path, "deepseek_v3", make_tokenizer([]))
    size = ["--nodes", "1", "--gpus-per-node", "2", "--model-config", str(tmp_path)]
    result = plan("configs/tiny_moe.yaml", *size)
    assert result.status == 0, result.err
    assert "1 x 2 x h100-80: fits. rank" in result.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["layout.tensor=3"],
            "tensor x context x pipeline = 96 does not divide the 128 ranks: start 384 ranks or a multiple",
        ),
        (["engine.args.quantisation=fp8"], "engine.args.quantisation: the installed SGLang has no such argument"),
        (["model.path=checkpoints/unknown"], "no config published under that name is known"),
        (["--cluster", "h100-81"], r"no such profile \(did you mean h100-80\?\)"),
        (["--cluster", "a100-80"], "the plan needs fp8_tflops, which the profile lacks"),
        (["--cluster", "{tmp}/number.yaml"], "cluster number: speed: Unexpected keyword argument"),
    ],
)
def test_bad_input_ends_with_one_sentence(plan: Plan, tmp_path: Path, arguments: list[str], sentence: str) -> None:
    profile = yaml.safe_load(PROFILES.read_text())["h100-80"]
    (tmp_path / "number.yaml").write_text(yaml.safe_dump(profile | {"speed": 2}))
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    result = plan("configs/moe_671b.yaml", *(["--nodes", "16"] if "--nodes" not in arguments else []), *arguments)
    assert result.status == 2
    assert re.search(sentence, result.err), result.err
    assert result.err.count("\n") == 1
