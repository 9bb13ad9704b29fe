"""Benches run what they say: settings, recipes and mutated lines are those of today's code."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mp.config import load_pipeline, load_settings
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.monitor.evaluation import Estimate, EvalScore
from grpo_mp.pipeline.stages import make_jobs
from grpo_mp.planner.clusters import Efficiency
from grpo_mp.planner.memory import SubPhase
from grpo_mp.planner.plan import make_plan
from tests.bench import hybrid_steps, learning_curves, ppo_beside_grpo, r1_stages, roofline
from tests.bench.mutations import MUTATIONS, ROOT, Mutation
from tests.bench.published_steps import PublishedStep, read_steps, rows_of
from tests.bench.quickstart_run import CONFIG
from tools.tiny.models import make_tiny, make_tokenizer

PAGE = ROOT / "grpo_mp" / "planner" / "README.md"
BENCHMARKS = ROOT / "grpo_mp" / "docs" / "benchmarks.md"


@pytest.mark.parametrize("file", sorted((ROOT / "tests" / "bench").glob("*.py")), ids=lambda file: file.stem)
def test_a_bench_can_be_imported(file: Path) -> None:
    import_module(f"tests.bench.{file.stem}")


@pytest.mark.parametrize("each", MUTATIONS, ids=lambda each: each.package)
def test_the_line_is_there_once_and_its_mutation_is_python(each: Mutation) -> None:
    text = (ROOT / "grpo_mp" / each.file).read_text()
    assert text.count(each.original) == 1
    compile(text.replace(each.original, each.mutated), each.file, "exec")
    assert (ROOT / "tests" / each.package).is_dir()


def test_ten_presets_differ_in_their_settings_alone() -> None:
    def settings(preset: str) -> dict[str, Any]:
        overrides = [f"algorithm={preset}", *learning_curves.always()]
        return load_settings(Path(CONFIG), overrides).model_dump(mode="json")

    resolved = {preset: settings(preset) for preset in learning_curves.PRESETS}
    algorithms = [str(one.pop("algorithm") | {"preset": ""}) for one in resolved.values()]
    assert len(resolved) == len({*algorithms}) == 10
    resolved["dapo"]["reward"]["overlong"] = resolved["grpo"]["reward"]["overlong"]  # a part of it
    assert all(one == resolved["grpo"] for one in resolved.values())
    assert resolved["grpo"]["training"]["updates_per_step"] > 1


def test_ppo_and_its_rivals_differ_in_the_algorithm_and_the_critic_alone() -> None:
    presets = ppo_beside_grpo.PRESETS
    of_preset = {name: load_settings(Path(CONFIG), ppo_beside_grpo.overrides(name, 40, 10)) for name in presets}
    assert {name for name, settings in of_preset.items() if settings.critic} == {"ppo"}
    assert {settings.algorithm.kl.coef for settings in of_preset.values()} == {0.02}
    rest = [settings.model_dump(exclude={"algorithm", "critic"}) for settings in of_preset.values()]
    assert all(each == rest[0] for each in rest)


def test_a_seed_of_r1_has_the_stages_of_the_recipe_and_two_beside_them(tmp_path: Path) -> None:
    recipe = r1_stages.CONFIG.read_text()
    file = tmp_path / "pipeline.yaml"
    file.write_text(r1_stages.make_pipeline(recipe, 3))
    jobs = {job.name: job for job in make_jobs(load_pipeline(file, []), file)}
    names = [*yaml.safe_load(recipe)["stages"], "zero", "sft_alone"]
    assert [name for name in jobs if not name.startswith("evaluate ")] == names
    assert all(job.settings["run.seed"] == 3 for job in jobs.values())
    assert jobs["reasoning"].settings["model.path"] == "runs/tiny_r1_seed3/cold_start/final"
    assert jobs["zero"].settings["model.path"] == "checkpoints/tiny_r1_seed3_base"
    assert (jobs["cold_start"].settings["run.epochs"], jobs["sft_alone"].settings["run.epochs"]) == (3, 6)
    paths = [word for job in jobs.values() for word in str(job).split("'") if "tiny_r1" in word]
    assert paths
    assert all("tiny_r1_seed3" in path for path in paths)


def test_a_row_of_r1_is_the_mean_over_seeds() -> None:
    def score(accuracy: float) -> EvalScore:
        return EvalScore(accuracy, 1.0, 9.0, pass_at={4: Estimate(1.0, 0.0)}, reward_terms={"boxed": 0.5})

    seeds = [{"base": score(0.0), "zero": score(accuracy), "sft_alone": score(0.5)} for accuracy in (0.25, 0.75)]
    table = r1_stages.make_table(seeds)
    assert list(table.columns[1].cells) == ["0.0 ± 0.0", "50.0 ± 35.4", "50.0 ± 0.0"]


def test_updates_of_a_hybrid_have_the_losses_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hybrid_steps, "UPDATES", 3)
    monkeypatch.setattr(hybrid_steps, "LEARNING_RATE", 1e-4)  # so that the second loss differs from the first
    make_tiny(tmp_path, "qwen3_5_moe_text", make_tokenizer([]), full_attention_interval=4, hidden_size=32)
    hybrid_steps.compare_training(tmp_path, hybrid_steps.make_chats(3))
    assert re.search(r"^train ratio \d+\.\d\d$", capsys.readouterr().out, re.MULTILINE)


def test_models_that_decode_beside_each_other_have_the_same_size(tmp_path: Path) -> None:
    sizes = []
    for family, shape in hybrid_steps.FAMILIES.items():
        make_tiny(tmp_path / family, family, make_tokenizer([]), **shape)
        hf = HfConfig.read(tmp_path / family)
        sizes.append(sum(param.num_elements for param in family_of(hf).params(hf).values() if not param.alias))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)


@pytest.fixture(scope="module")
def steps() -> list[PublishedStep]:
    return read_steps()


def test_half_of_the_published_steps_check_the_rates(steps: list[PublishedStep]) -> None:
    fitted = [step for step in steps if step.fitted]
    assert len(fitted) in (len(steps) // 2, (len(steps) + 1) // 2)
    assert {step.job.world_size for step in steps} >= {16, 32, 96, 128, 256}


def test_the_page_has_the_table_of_published_steps(steps: list[PublishedStep]) -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert not [row for row in rows_of(steps) if f"| {' | '.join(row)} |" not in lines]


def test_rates_and_weight_sync_count(steps: list[PublishedStep]) -> None:
    step = next(step for step in steps if step.name.startswith("Llama"))
    half = Efficiency(matmul=0.15, device_memory=0.3, link=0.35)
    assert step.expected_s("train", half) == pytest.approx(2 * step.expected_s("train"), rel=0.02)
    assert step.expected_s("step", half) < 2 * step.expected_s("step")
    plan = make_plan(step.job)
    assert step.expected_s("step") == pytest.approx(plan.step_s - plan.seconds(SubPhase.CHECK))
    assert plan.seconds(SubPhase.SYNC) > 1


def test_rooflines_and_losses_add_up_to_the_step(steps: list[PublishedStep]) -> None:
    """A dense model trains with 6 FLOPs per parameter and token, plus the products of attention."""
    step = next(step for step in steps if step.name.startswith("Llama"))
    plan = make_plan(step.job)
    least = roofline.rooflines(plan)
    lost = roofline.losses(plan)
    assert sum(least.values()) + sum(lost.values()) == pytest.approx(plan.step_s)
    assert min(lost.values()) > 0
    tokens = step.job.settings.samples_per_step * step.job.mean_seq_len / step.job.world_size
    cluster = step.job.cluster
    of_parameters_s = 6 * 8.03e9 * tokens / (cluster.bf16_tflops * 1e12 * cluster.achievable.matmul)
    assert 0.9 < least["train"] / of_parameters_s < 1.3


def test_the_page_has_the_roofline_of_the_largest_recipe() -> None:
    config = "configs/moe_671b.yaml"
    table = roofline.table(make_plan(roofline.read_job(load_settings(Path(config), []), "h100-80", 16)))
    page = BENCHMARKS.read_text(encoding="utf-8")
    assert f"python -m tests.bench.roofline {config} --cluster h100-80 --nodes 16" in page
    assert table in page
    assert float(table.rpartition("|")[0].rpartition("|")[2]) <= 1.8
