"""What stages take is there, or made by a stage before: told before anything starts."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mp.config import load_pipeline
from grpo_mp.pipeline.inputs import CRITIC, POLICY, TEACHER, StageInputs, read_inputs
from grpo_mp.pipeline.stages import make_jobs
from grpo_mp.utils.errors import UserError
from tests.minimal_settings import MINIMAL_SETTINGS

TEACHER_SECTION = "algorithm.distillation"
PPO = {"algorithm": "ppo", "algorithm.kl.coef": 0.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Settings of RL and of fine-tuning, with models and data that are there."""
    for name, width in (("m", 8), ("other", 16)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"hidden_size": width}))
    for name in ("prompts.jsonl", "chats.jsonl"):
        (tmp_path / name).write_text("{}")
    rl = {**MINIMAL_SETTINGS, "data": {"train": str(tmp_path / "prompts.jsonl")}}
    sft = {name: MINIMAL_SETTINGS[name] for name in ("run", "optimizer")}
    sft |= {"data": {"train": str(tmp_path / "chats.jsonl")}, "sft": {"batch_size": 1, "max_tokens": 8}}
    for name, settings in (("rl", rl), ("sft", sft)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**settings, "model": {"path": str(tmp_path / "m")}}))
    return tmp_path


STAGES: dict[str, Any] = {
    "start": {"command": "sft", "config": "sft.yaml"},
    "rl": {"command": "train", "config": "rl.yaml", "settings": {"model.path": "{start}/final"}},
    "found": {"command": "sample", "config": "rl.yaml", "settings": {"model.path": "{rl}/final"}},
    "last": {"command": "train", "config": "rl.yaml", "settings": {}},
}


def inputs_of(folder: Path, *done: str, last: Any = None, **more: Any) -> dict[str, StageInputs]:
    """Read what the stages take, the last of which has these settings."""
    stages = deepcopy(STAGES)
    stages["last"]["settings"] = last or {}
    text = yaml.safe_dump({"folder": str(folder / "out"), "stages": stages, **more}, sort_keys=False)
    (folder / "pipeline.yaml").write_text(text)
    file = folder / "pipeline.yaml"
    return {one.job.name: one for one in read_inputs(make_jobs(load_pipeline(file), file), done)}


def test_a_stage_has_the_model_of_the_first_before_it(folder: Path) -> None:
    taken = {**PPO, "model.path": str(folder / "other"), "critic": {"path": "{rl}/final"}}
    evaluation = {"config": "rl.yaml", "settings": {"data.eval": {"held": str(folder / "prompts.jsonl")}}}
    found = inputs_of(folder, last=taken, base=str(folder / "other"), evaluation=evaluation)
    widths = {name: one.models[POLICY].values["hidden_size"] for name, one in found.items()}
    assert (widths["start"], widths["rl"], widths["found"], widths["last"]) == (8, 8, 8, 16)
    assert (widths["evaluate base"], widths["evaluate rl"]) == (16, 8)
    assert found["last"].models[CRITIC].values["hidden_size"] == 8
    assert {name for name, one in found.items() if not one.waits} == {"start", "evaluate base"}
    assert [file.setting for file in found["evaluate rl"].data] == ["data.eval.held.path"]
    assert [file.setting for file in found["found"].data] == ["data.train"]
    taken = {f"{TEACHER_SECTION}": {"teacher": {"folder": "{rl}/final"}}, "model.path": str(folder / "other")}
    assert inputs_of(folder, last=taken)["last"].models[TEACHER].values["hidden_size"] == 8


@pytest.mark.parametrize(
    ("taken", "sentence"),
    [
        ({"model.path": "nomodel"}, "^stage last: model.path=nomodel: nomodel/config.json does not exist: download"),
        ({**PPO, "critic": {"path": "nomodel"}}, "^stage last: critic.path=nomodel: nomodel/config.json does not"),
        ({TEACHER_SECTION: {"teacher": {"folder": "nomodel"}}}, f"^stage last: {TEACHER}=nomodel: .* does not exist"),
        ({"reward.model": {"folder": "nomodel"}}, "^stage last: reward.model.folder=nomodel: .* does not exist"),
        ({"data.train": "no.jsonl"}, "^stage last: no.jsonl: no such file: set data.train to an existing one"),
        ({"data.train": {"a": "no.jsonl", "b": "no"}}, "^stage last: no.jsonl: .* set data.train.a.path to"),
        ({"data.train": "/no/set"}, "^stage last: /no/set: no such file"),
        ({"data.eval": {"held": "no.parquet"}}, "^stage last: no.parquet: .* set data.eval.held.path to"),
        ({"data.train": {"a": {"path": "name", "pass_rates": "no.jsonl"}}}, "set data.train.a.pass_rates to"),
        ({"reward.functions": {"nowhere.py:f": 1.0}}, "^stage last: nowhere.py:f: no such file: nowhere.py"),
        ({"data.source": "nowhere.py:f"}, "^stage last: nowhere.py:f: no such file"),
        (
            {"model.path": "{rl}/checkpoints/step_000010"},
            r"^stage last: model.path=.*step_000010 is no model: stage rl \(train\) makes final, and exports/",
        ),
        ({"model.path": "{found}/samples.parquet"}, r"is no model: stage found \(sample\) makes none"),
        ({"data.train": "{rl}/final"}, r"^stage last: data.train=.*final is no data: stage rl \(train\) makes none"),
        ({"model.path": "out/evaluate/base"}, "^stage last: model.path=out/evaluate/base: .* does not exist"),
        ({"data.train": "{found}/groups"}, r"is no data: stage found \(sample\) makes samples.parquet and pass_rates"),
        ({"reward.model": {"folder": "{rl}/final"}}, "^stage last: reward.model.folder=.*without a reward head"),
    ],
)
def test_what_is_not_there_is_told(folder: Path, taken: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        inputs_of(folder, last=taken)


def test_what_may_be_elsewhere_is_not_missed(folder: Path) -> None:
    """Data sets of the hub, what a user's source reads, answers and models that former stages will have."""
    (folder / "mine.py").write_text("def read(name): ...")
    evaluation = {"config": "rl.yaml", "settings": {"data.eval": {"held": str(folder / "prompts.jsonl")}}}
    for taken in (
        {"data.train": "openai/gsm8k:train"},
        {"data.train": "{rl}/final", "data.source": f"{folder}/mine.py:read"},
        {"data.train": {"a": {"path": "{found}/samples.parquet", "pass_rates": "{found}/pass_rates.jsonl"}}},
        {"data.train": str(folder / "out/found/samples.parquet")},
        {"data.train": {"a": {"path": "name", "pass_rates": str(folder / "out/evaluate/base/samples.jsonl")}}},
        {"model.path": "{start}/exports/step_000010"},
    ):
        assert inputs_of(folder, last=taken, base=str(folder / "m"), evaluation=evaluation)["last"]


def test_of_stages_that_are_done_nothing_is_missed_and_their_models_are_read(folder: Path) -> None:
    taken = {"model.path": "{start}/final"}
    assert inputs_of(folder, last=taken)["last"].waits
    with pytest.raises(UserError, match=r"^stage rl: model.path=.*out/start/final: .* does not exist"):
        inputs_of(folder, "start")
    (folder / "out/start/final").mkdir(parents=True)
    (folder / "out/start/final/config.json").write_text('{"hidden_size": 32}')
    (folder / "chats.jsonl").unlink()
    found = inputs_of(folder, "start", last=taken)
    assert "start" not in found
    assert not found["last"].waits
    assert {found[name].models[POLICY].values["hidden_size"] for name in ("rl", "found", "last")} == {32}
