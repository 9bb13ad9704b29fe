"""The bench of R1's stages: a seed's pipeline is the recipe's with its own folders, and nothing of another seed's."""

from pathlib import Path

import yaml

from grpo_mp.algorithms.evaluation import Estimate, EvalScore
from grpo_mp.config import load_pipeline
from grpo_mp.pipeline.stages import make_jobs
from tests.bench.r1_stages import CONFIG, make_pipeline, make_table, plot


def test_a_seed_has_the_stages_of_the_recipe_and_two_beside_them(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(make_pipeline(CONFIG.read_text(), 3))
    settings = load_pipeline(file, [])
    jobs = {job.name: job for job in make_jobs(settings, file)}
    recipe = list(yaml.safe_load(CONFIG.read_text())["stages"])
    assert [name for name in jobs if not name.startswith("evaluate ")] == [*recipe, "zero", "sft_alone"]
    assert all(job.settings["run.seed"] == 3 for job in jobs.values())
    assert jobs["reasoning"].settings["model.path"] == "runs/tiny_r1_seed3/cold_start/final"
    assert jobs["zero"].settings["model.path"] == "checkpoints/tiny_r1_seed3_base"
    assert (jobs["cold_start"].settings["sft.epochs"], jobs["sft_alone"].settings["sft.epochs"]) == (3, 6)
    paths = [word for job in jobs.values() for word in str(job).split("'") if "tiny_r1" in word]
    assert paths
    assert all("tiny_r1_seed3" in path for path in paths)


def test_a_row_is_the_mean_over_seeds() -> None:
    def score(accuracy: float) -> EvalScore:
        return EvalScore(accuracy, 1.0, 9.0, pass_at={4: Estimate(1.0, 0.0)}, reward_terms={"boxed": 0.5})

    seeds = [{"base": score(0.0), "zero": score(accuracy), "sft_alone": score(0.5)} for accuracy in (0.25, 0.75)]
    table = make_table(seeds)
    assert list(table.columns[1].cells) == ["0.0 ± 0.0", "50.0 ± 35.4", "50.0 ± 0.0"]
    assert list(table.columns[3].cells) == ["50.0 ± 0.0"] * 3
    rows = [[bar.get_height() for bar in axes.patches] for axes in plot(seeds).axes]  # type: ignore[attr-defined]
    assert rows == [[0.0, 50.0, 50.0], [100.0] * 3, [50.0] * 3, [9.0] * 3]
