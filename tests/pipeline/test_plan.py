"""The plan of a pipeline beside the plans of its stages."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mp.cli.plan import main
from grpo_mp.config import Settings, check_settings, load_pipeline, load_settings
from grpo_mp.pipeline.plan import Machines, StagePlan, plan_pipeline
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.job import make_job
from grpo_mp.planner.memory import SubPhase
from grpo_mp.planner.model_configs import named_config
from grpo_mp.planner.parameter_count import ComingModel, stored_bytes
from grpo_mp.planner.plan import make_plan
from grpo_mp.planner.reward_memory import teacher_memory
from grpo_mp.utils.errors import UserError
from tests.minimal_settings import MINIMAL_SETTINGS
from tests.recipes import CONFIGS, PIPELINES

NODE = Machines(read_cluster("h100-80"), 1)
MODEL = "Qwen2.5-Math-7B"
RL = {**MINIMAL_SETTINGS, "model": {"path": f"checkpoints/{MODEL}"}, "layout": {"tensor": 2}}
STAGES: dict[str, Any] = {
    "start": {
        "command": "sft",
        "config": "sft.yaml",
        "settings": {"model.path": f"checkpoints/{MODEL}"},
        "rows": 1000,
    },
    "rl": {"command": "train", "config": "rl.yaml", "settings": {"model.path": "{start}/final", "run.steps": 7}},
    "found": {"command": "sample", "config": "rl.yaml", "settings": {"model.path": "{rl}/final"}, "rows": 100},
}
SFT = {
    "run": {"folder": "r"},
    "model": {"path": "m"},
    "layout": {"tensor": 2},
    "data": {"train": "t.jsonl"},
    "sft": {"batch_size": 16, "epochs": 3, "max_tokens": 1024},
    "optimizer": {"lr": 1e-5},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(RL))
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(SFT))
    return write(tmp_path, STAGES)


def write(folder: Path, stages: dict[str, Any]) -> Path:
    (folder / "pipeline.yaml").write_text(yaml.safe_dump({"folder": "out", "stages": stages}, sort_keys=False))
    return folder / "pipeline.yaml"


def test_hours_are_those_of_the_stages_steps(file: Path) -> None:
    """A stage that begins with what a former one ends with has its model."""
    start, rl, found = plan_pipeline(load_pipeline(file), file, NODE)
    alone = make_plan(make_job(load_settings(file.parent / "rl.yaml"), named_config(MODEL), NODE.cluster, 1))
    assert (start.steps, rl.steps) == (188, 7)  # 3 x 1000 / 16, rounded up
    assert (rl.step_s, rl.gpus) == (pytest.approx(alone.step_s), 8)
    assert found.step_s == alone.times[SubPhase.GENERATE].expected_s
    assert found.steps == -(-100 // alone.job.settings.rollout.prompts_per_step)
    assert rl.row[-1] == f"{7 * alone.step_s * 8 / 3600:,.0f}"
    assert all(plan.fits for plan in (start, rl, found))


def test_a_sampling_has_engines_alone_on_all_devices(file: Path) -> None:
    """What is trained by the same settings does not fit on one device, and leaves engines half of eight."""
    one = Machines(NODE.cluster, 1, gpus_per_node=1)
    stages = {name: {**STAGES["rl" if name == "rl" else "found"]} for name in ("rl", "found")}
    for name, stage in stages.items():
        stage["settings"] = {"model.path": f"checkpoints/{MODEL}", "layout": {}}
        plans = plan_pipeline(load_pipeline(write(file.parent, {name: stage})), file, one)
        assert [plan.fits for plan in plans] == [name == "found"]
        assert ("optimizer" in plans[0].why) == (name == "rl")
    divided = {"schedule": "async", "engine.ranks": 4, "algorithm.kl.coef": 0.1}
    for more in ({}, divided):
        stages[f"found_{len(more)}"] = {**stages["found"], "settings": stages["found"]["settings"] | more}
    (whole, half) = plan_pipeline(
        load_pipeline(write(file.parent, {name: stages[name] for name in ("found_0", "found_3")})), file, NODE
    )
    assert whole.step_s == half.step_s


@pytest.mark.parametrize("stage", ["start", "found"])
def test_a_length_that_follows_from_data_must_be_said(file: Path, stage: str) -> None:
    stages = {name: {key: one[key] for key in one if (name, key) != (stage, "rows")} for name, one in STAGES.items()}
    with pytest.raises(
        UserError, match=rf"^stage {stage}: its length follows from its data .*: say .* as rows: 10000$"
    ):
        plan_pipeline(load_pipeline(write(file.parent, stages)), file, NODE)


def test_a_stage_that_does_not_fit_is_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file.parent / "sft.yaml").write_text(yaml.safe_dump({**SFT, "layout": {}, "model": {"path": "m"}}))
    stages = STAGES | {"start": {**STAGES["start"], "settings": {"model.path": "checkpoints/Qwen3-32B"}}}
    arguments = [str(write(file.parent, stages)), "--cluster", "h100-80"]
    assert main(arguments) == 1
    assert "start: " in capsys.readouterr().out
    with pytest.raises(UserError, match="a pipeline is planned by machines alone"):
        main([*arguments, "--times"])


@pytest.mark.parametrize(
    ("stage", "settings", "words"),
    [
        ("start", {"sft.max_tokens": 4097}, r"sft\.max_tokens = 4097"),
        ("rl", {"rollout.max_response_tokens": 4000}, r"max_response_tokens = 5024"),
    ],
)
def test_a_stage_that_its_model_has_no_positions_for_is_refused(
    file: Path, stage: str, settings: dict[str, int], words: str
) -> None:
    rollout = {"prompts_per_step": 8, "group_size": 8, "max_prompt_tokens": 1024, "max_response_tokens": 1024}
    (file.parent / "rl.yaml").write_text(yaml.safe_dump(RL | {"rollout": rollout}))
    stages = STAGES | {stage: {**STAGES[stage], "settings": STAGES[stage]["settings"] | settings}}
    with pytest.raises(UserError, match=rf"^stage {stage}: .*{words}.* but the model has only 4096 positions"):
        plan_pipeline(load_pipeline(write(file.parent, stages)), file, NODE)


BYTES = 2 * 7_615_616_512  # of Qwen2.5-Math-7B in bfloat16, as published
TEACHER = "algorithm.distillation"
PPO = {"algorithm": "ppo", "algorithm.kl.coef": 0.0}


def plan_with(file: Path, last: dict[str, Any], start: dict[str, Any] | None = None) -> list[StagePlan]:
    """Plan the cold start, the RL after it, and a last stage of RL of the model from which the first began."""
    settings = {"model.path": f"checkpoints/{MODEL}", "run.steps": 1}
    stages = {
        "start": {**STAGES["start"], "settings": STAGES["start"]["settings"] | (start or {})},
        "rl": STAGES["rl"],
        "last": {"command": "train", "config": "rl.yaml", "settings": settings | last},
    }
    written = write(file.parent, stages)
    return plan_pipeline(load_pipeline(written), written, NODE)


def test_a_teacher_may_be_a_former_stages_model(file: Path) -> None:
    """It takes as much room as files of its parameters would."""
    coming = plan_with(file, {TEACHER: {"teacher": {"folder": "{rl}/final"}}})[-1]
    there = file.parent / "teacher"
    there.mkdir()
    with (there / "model.safetensors").open("wb") as weights:
        weights.truncate(BYTES)  # no blocks are written
    on_disk = plan_with(file, {TEACHER: {"teacher": {"folder": str(there)}}})[-1]
    assert coming == on_disk
    assert coming.why != plan_with(file, {})[-1].why
    with pytest.raises(UserError, match=r"^stage last: .*teacher.folder=elsewhere: it has no weights"):
        plan_with(file, {TEACHER: {"teacher": {"folder": "elsewhere"}}})


def test_what_servers_of_a_coming_model_hold() -> None:
    settings = load_settings_of({TEACHER: {"teacher": {"folder": "t", "gpus_per_server": 2}}})
    hf = named_config(MODEL)
    coming = {Path("t"): ComingModel(hf, stored_bytes(hf, 2, fp8=False))}
    job = make_job(settings, hf, NODE.cluster, 1, coming=coming)
    assert coming[Path("t")].weight_bytes == BYTES
    assert teacher_memory(job).weights == BYTES / 2
    in_fp8 = stored_bytes(hf, 2, fp8=True)
    embeddings = 2 * 2 * hf.int("vocab_size") * hf.int("hidden_size")  # with the output layer, which stays as it is
    assert in_fp8 - embeddings == pytest.approx((BYTES - embeddings) / 2, rel=1e-3)


def load_settings_of(values: dict[str, Any]) -> Settings:
    return check_settings({**RL, "algorithm": {"distillation": values[TEACHER]}}, "test")


def test_a_stage_may_begin_with_an_export(file: Path) -> None:
    every = {"run.export_every": 5}
    begun = plan_with(file, {"model.path": "{start}/exports/step_000010"}, every)[-1]
    assert begun == plan_with(file, {"model.path": "{start}/final"}, every)[-1]
    with pytest.raises(UserError, match=r"^stage last: .*start/checkpoints/step_000010 is no model: stage start"):
        plan_with(file, {"model.path": "{start}/checkpoints/step_000010"})


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.stem)
def test_a_pipeline_of_the_repository_loads(path: Path) -> None:
    assert load_pipeline(path).stages


@pytest.mark.slow
def test_r1s_stages_fit_and_are_as_long_as_published() -> None:
    """arXiv 2501.12948: 10,400 updates of R1-Zero, 1,700 of the second RL, 400 of these with preferences."""
    file = CONFIGS / "r1_pipeline.yaml"
    machines = Machines(read_cluster("h100-80"), 16)
    plans = {plan.name: plan for plan in plan_pipeline(load_pipeline(file), file, machines)}
    assert all(plan.fits for plan in plans.values())
    updates = {name: 16 * plan.steps for name, plan in plans.items() if plan.command == "train"}
    assert updates == {"reasoning": 10400, "all_scenarios": 1296, "preferences": 400}
    assert (plans["fine_tuning"].steps, plans["distillation"].steps) == (2 * 800000 / 128, 2 * 800000 / 64)
