"""Stages that cannot run are refused before the first one starts, by the checks of their own commands."""

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mp.cli.pipeline import main
from grpo_mp.config import load_pipeline
from grpo_mp.pipeline import preflight
from grpo_mp.pipeline.inputs import read_inputs
from grpo_mp.pipeline.preflight import check_stages, job_size
from grpo_mp.pipeline.runner import Pipeline
from grpo_mp.pipeline.stages import make_jobs
from grpo_mp.utils.errors import UserError
from tests.conftest import TinyRun

TWO = (2, 2)
MODEL = {"model.path": "{start}/final"}


@pytest.fixture
def folder(tiny_run: TinyRun, tmp_path: Path) -> Path:
    """Settings of RL and of fine-tuning of a tiny model."""
    settings = yaml.safe_load(tiny_run.config.read_text())
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(settings))
    rows = [{"prompt": json.loads(line)["question"], "completion": "1"} for line in tiny_run.train.open()]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sft = {name: settings[name] for name in ("model", "layout", "optimizer")}
    sft |= {"run": {"folder": "unused", "steps": 2}, "data": {"train": str(tmp_path / "chats.jsonl")}}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump({**sft, "sft": {"batch_size": 4, "max_tokens": 64}}))
    return tmp_path


def write(folder: Path, stage: dict[str, Any] | None = None, **more: Any) -> Path:
    """Write a pipeline of a cold start, and one stage more."""
    stages = {"start": {"command": "sft", "config": "sft.yaml"}} | ({"last": stage} if stage else {})
    file = folder / "pipeline.yaml"
    file.write_text(yaml.safe_dump({"folder": str(folder / "out"), "stages": stages, **more}, sort_keys=False))
    return file


def check(file: Path, size: tuple[int, int] | None = TWO) -> None:
    check_stages(read_inputs(make_jobs(load_pipeline(file), file), ()), size)


def rl(settings: dict[str, Any], command: str = "train") -> dict[str, Any]:
    return {"command": command, "config": "rl.yaml", "settings": MODEL | settings}


def test_what_can_run_is_accepted(folder: Path, tiny_run: TinyRun) -> None:
    evaluation = {"config": "rl.yaml", "settings": {}}
    stage = rl({"sample.filters": ["right", {"best": {"k": 2}}]}, "sample")
    file = write(folder, stage, base=str(tiny_run.model), evaluation=evaluation)
    check(file)
    check(file, None)
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        (
            rl({"layout": {"tensor": 7}}),
            "^stage last: layout: tensor x context x pipeline = 7 does not divide the 2 ranks",
        ),
        (rl({"engine.gpus_per_engine": 4}), "^stage last: an engine of .* does not fit the 2 ranks"),
        (rl({"rollout.max_response_tokens": 10**6}), "^stage last: rollout.max_prompt_tokens .* has only"),
        (rl({"reward.functions": {"nomodule:f": 1.0}}), "^stage last: reward.functions 'nomodule:f': importing"),
        (rl({"data.source": "nomodule:f"}), "^stage last: data.source 'nomodule:f': importing nomodule failed"),
        (rl({"algorithm.policy_loss": "nomodule:f"}), "^stage last: algorithm.policy_loss.* importing nomodule"),
        (rl({"monitor.guards": {"nometric": {"min": 0.0, "steps": 1}}}), "^stage last: monitor.guards: .*nometric"),
        (
            rl({"algorithm": "ppo", "critic": {"layout": {"tensor": 7}}}),
            "^stage last: critic.layout: tensor x context x pipeline = 7 does not divide the 2 ranks",
        ),
        (
            rl({"sample.filters": [{"best": {"k": 99}}]}, "sample"),
            "^stage last: sample.filters.best: the best k=99 of 4 answers",
        ),
        (rl({"sample.filters": [{"tokens": {"mn": 3}}]}, "sample"), "^stage last: sample.filters.tokens .*'mn'"),
        (
            {"command": "sft", "config": "sft.yaml", "settings": MODEL | {"layout": {"tensor": 7}}},
            "^stage last: layout: tensor x context x pipeline = 7 does not divide the 2 ranks",
        ),
        (
            {"command": "sft", "config": "sft.yaml", "settings": MODEL | {"sft.max_tokens": 10**6}},
            "^stage last: sft.max_tokens = 1000000, but the model has only",
        ),
    ],
)
def test_what_follows_from_settings_is_told_of_a_model_that_is_to_come(
    folder: Path, stage: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        check(write(folder, stage))


def test_without_ranks_a_layout_is_compared_with_the_model_alone(folder: Path) -> None:
    with pytest.raises(UserError, match=r"^stage last: layout: tensor=7 does not divide the 4 attention heads"):
        check(write(folder, rl({"layout": {"tensor": 7}})), None)
    file = write(folder, rl({"layout": {"tensor": 2, "context": 4}}))
    check(file, None)
    with pytest.raises(UserError, match=r"^stage last: layout: tensor x context x pipeline = 8 does not divide the 2"):
        check(file)


def test_a_critic_that_is_to_come_has_the_policys_vocabulary(folder: Path, tiny_run: TinyRun) -> None:
    config = json.loads((tiny_run.model / "config.json").read_text())
    (folder / "other").mkdir()
    (folder / "other/config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 64}))
    stage = rl({"algorithm": "ppo", "critic": {"path": "{start}/final"}, "model.path": str(folder / "other")})
    with pytest.raises(UserError, match=r"^stage last: critic\.path=.*: its vocab_size is \d+, the policy's"):
        check(write(folder, stage))


def test_the_ranks_are_those_that_are_asked_for_or_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (job_size(3, starts=False), job_size(None, starts=True), job_size(None, starts=False)) == (
        (3, 3),
        (1, 1),
        None,
    )
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert job_size(None, starts=False) == (4, 4)


def of_base(tiny_run: TinyRun, settings: dict[str, Any], command: str = "train") -> dict[str, Any]:
    return rl({"model.path": str(tiny_run.model), **settings}, command)


@pytest.mark.parametrize(
    ("command", "settings", "sentence"),
    [
        ("train", {"data.prompt_column": "quest"}, "^stage last: .*no column quest .did you mean question"),
        ("train", {"rollout.prompts_per_step": 10**4}, "^stage last: .* a step takes rollout.prompts_per_step=10000"),
        ("sample", {"data.answer_column": "anser"}, "^stage last: .*no column anser .did you mean answer"),
        ("sft", {"data.completion_column": "complet"}, "^stage last: .*complet"),
    ],
)
def test_what_is_there_is_checked_as_by_its_own_start(
    folder: Path, tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, command: str, settings: Any, sentence: str
) -> None:
    stage = of_base(tiny_run, settings, command)
    file = write(folder, stage if command != "sft" else {**stage, "config": "sft.yaml"})
    with pytest.raises(UserError, match=sentence):
        check(file)
    check(file, None)
    monkeypatch.setattr(preflight, "DATA_BYTES", 10)  # its rows take long
    check(file)


def test_an_evaluation_is_checked_with_the_base(folder: Path, tiny_run: TinyRun) -> None:
    evaluation: dict[str, Any] = {"config": "rl.yaml", "settings": {"data.eval": {}}}
    with pytest.raises(UserError, match=r"^stage evaluate start: .*data.eval names no set"):
        check(write(folder, evaluation=evaluation))
    evaluation["settings"] = {"data.prompt_column": "quest"}
    with pytest.raises(UserError, match=r"^stage evaluate base: .*no column quest"):
        check(write(folder, base=str(tiny_run.model), evaluation=evaluation))


def test_a_teachers_server_need_not_be_up_before_its_stage(folder: Path, tiny_run: TinyRun) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        teacher = {"url": f"http://127.0.0.1:{server.getsockname()[1]}", "timeout_s": 0.2, "retries": 0}
        check(write(folder, of_base(tiny_run, {"algorithm.distillation": {"teacher": teacher}})))
        with pytest.raises(BlockingIOError):  # nobody has asked it
            server.accept()


def test_users_code_is_imported_in_a_process_that_ends(
    folder: Path, tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    code = folder / "reward_of_ahead.py"
    code.write_text(f"import os, pathlib\npathlib.Path({str(folder / 'pid')!r}).write_text(str(os.getpid()))\n")
    file = write(folder, rl({"reward.functions": {f"{code}:f": 1.0}}))
    with pytest.raises(UserError, match=rf"^stage last: reward.functions .*{code} has no f"):
        main([str(file), "--ranks", "2", "--dry-run"])
    assert int((folder / "pid").read_text()) != os.getpid()
    assert not any(name.startswith("grpo_mp_user_reward_of_ahead") for name in sys.modules)
    code.write_text(f"import os\nos.kill(os.getpid(), {int(signal.SIGKILL)})")
    settings = load_pipeline(file)
    with pytest.raises(UserError, match="what checks the stages was killed, and nothing has started"):
        Pipeline(settings, make_jobs(settings, file)).check(2, starts=False)
    code.write_text("def f(completions, **_): return [0.0] * len(completions)")
    assert main([str(file), "--ranks", "2", "--dry-run"]) == 0
    assert "to do  last: grpo-mp train" in capsys.readouterr().out
    assert not (folder / "out").exists()
