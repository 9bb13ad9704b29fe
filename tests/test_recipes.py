"""Every recipe in configs/ loads, says the same again when its resolved form is read, and follows the pages' advice."""

import re
from pathlib import Path

import pytest

from grpo_mp.config import Settings, dump_settings, load_any_settings, load_pipeline, load_settings
from grpo_mp.distributed.layout import model_shape
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.monitor.guards import MetricGuards
from grpo_mp.pipeline.stages import make_jobs
from grpo_mp.planner.model_configs import find_config
from grpo_mp.rewards.scorer import Scorer
from grpo_mp.rollout.engine_layout import engine_format
from grpo_mp.trainer.preflight import start_warnings
from grpo_mp.utils.errors import UserError
from tests.recipes import FULL_SIZE, PIPELINES, RL, SECTIONS, SFT


def stages_of(pipeline: Path) -> list[tuple[str, Settings, Path]]:
    """The stages of a pipeline that train by RL: name, settings, and the recipe whose model they train."""
    jobs = [job for job in make_jobs(load_pipeline(pipeline), pipeline) if job.command == "train"]
    return [(f"{pipeline.stem}-{job.name}", load_settings(job.config, job.overrides), job.config) for job in jobs]


RUNS = [(path.stem, load_settings(path), path) for path in RL] + [run for path in PIPELINES for run in stages_of(path)]
ON_GPUS = [run for run in RUNS if run[2] in FULL_SIZE]


def by_name(runs: list[tuple[str, Settings, Path]]) -> pytest.MarkDecorator:
    """A parametrization by the settings of each run and the config of its recipe's model."""
    cases = [
        pytest.param(settings, published(recipe) if recipe in FULL_SIZE else None, id=name)
        for name, settings, recipe in runs
    ]
    return pytest.mark.parametrize(("settings", "hf"), cases)


def published(recipe: Path) -> HfConfig:
    return find_config(load_settings(recipe).model.path)[0]


@pytest.mark.parametrize("path", SECTIONS, ids=lambda path: path.stem)
def test_files_that_a_recipe_names_are_there(path: Path) -> None:
    for name in re.findall(r"\b(?:launch|configs)/\w+\.(?:sh|yaml)", path.read_text()):
        assert (path.parents[1] / name).is_file(), name


@pytest.mark.parametrize("path", [*RL, *SFT], ids=lambda path: path.stem)
def test_a_recipe_loads(path: Path, tmp_path: Path) -> None:
    settings = load_any_settings(path)
    resolved = tmp_path / "settings.yaml"
    resolved.write_text(dump_settings(settings))
    assert load_any_settings(resolved) == settings


@pytest.mark.parametrize("path", RL, ids=lambda path: path.stem)
def test_a_recipe_stops_where_its_reward_collapses(path: Path) -> None:
    """And at once neither where it learns nor where a step is bad."""
    guards = MetricGuards(load_settings(path).monitor.guards)
    for step in range(1, 101):
        guards.check(step, {"reward/mean": 0.5 + step / 250 - (step == 50), "train/entropy": 0.2})

    def collapse() -> None:
        for step in range(101, 131):
            guards.check(step, {"reward/mean": 0.0, "train/entropy": 0.2})

    with pytest.raises(UserError, match=r"reward/mean fell by .* the run stops"):
        collapse()


@by_name(RUNS)
def test_a_recipe_starts_without_a_warning(settings: Settings, hf: HfConfig | None) -> None:
    in_low_precision = hf is not None and engine_format(settings.engine.args, hf, cpu=False)
    precision = "FP8" if in_low_precision or settings.engine.has_fp8_cache else None
    assert start_warnings(settings.algorithm, settings.rollout, precision) == []
    scorer = Scorer(settings.reward, settings.rollout.max_response_tokens, set_weights=settings.data.set_weights)
    assert scorer.warnings == ()


@by_name(ON_GPUS)
def test_a_recipe_corrects_for_its_engine(settings: Settings, hf: HfConfig) -> None:
    """Kernels of engine and trainer round differently on GPUs; most engines are in FP8, too."""
    correction = settings.algorithm.rollout_correction
    assert (correction.kind, correction.level, correction.high) == ("truncate", "token", 2.0)
    assert settings.model.fp32_head


@by_name(RUNS)
def test_a_mixture_of_experts_with_several_updates_replays_routes_or_has_sequence_ratios(
    settings: Settings, hf: HfConfig | None
) -> None:
    """As the table of presets, the rule `mismatch` and Megatron-LM#4168 say."""
    is_moe = hf is None or model_shape(hf).num_moe_layers > 0
    several = settings.optimizer_steps_per_step > 1
    steady = settings.training.router_replay != "none" or settings.algorithm.ratio != "token"
    assert steady or not (is_moe and several)
    if hf is not None:
        assert is_moe or settings.training.router_replay == "none"
