"""Reward models and teachers that the job serves: what is refused, who is asked, what a plan counts."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from grpo_mp.config import Settings, check_settings
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.job import make_job
from grpo_mp.planner.memory import SubPhase, plan_memory
from grpo_mp.planner.model_configs import published_config
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.rollout.reward_servers import RewardServers, check_served_models, served_models
from grpo_mp.rollout.rollout import base_spec
from grpo_mp.utils.errors import EngineError, UserError
from grpo_mp.utils.types import Prompt, SampleGroup
from tests.conftest import TinyRun
from tests.minimal_settings import MINIMAL_SETTINGS
from tests.reward_models import make_reward_model


def settings(reward: dict[str, Any], **sections: Any) -> Settings:
    return check_settings(MINIMAL_SETTINGS | {"reward": reward} | sections, "test")


def check(chosen: Settings, tiny_run: TinyRun, world_size: int, ranks_per_node: int) -> None:
    distillation = chosen.algorithm.distillation
    models = served_models(chosen.reward, distillation.teachers if distillation else {})
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.model)
    check_served_models(models, chosen.model, chosen.max_request_tokens, tokenizer, world_size, ranks_per_node)


@pytest.fixture(scope="module")
def folder(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward_model")
    make_reward_model(folder, tiny_run.model)
    return folder


def test_a_reward_model_with_the_policys_tokenizer_is_accepted(tiny_run: TinyRun, folder: Path) -> None:
    chosen = settings({"model": {"path": str(folder), "args": {"tp_size": 2}}})
    check(chosen, tiny_run, 4, 2)


@pytest.mark.parametrize(
    ("reward", "sections", "sentence"),
    [
        ({"model": {}}, {}, "reward.model.path is missing"),
        (
            {"model": {"path": "rm"}},
            {"schedule": "async", "engine": {"ranks": 1}, "sync": {"pause": "in_place"}},
            "reward.model.path=rm is served in SCORE on the devices of all ranks, which schedule=async has no phase",
        ),
        ({"model": {"path": "rm"}}, {"algorithm": {"filter": {"zero_std": "drop"}}}, "filter.metric=reward needs"),
    ],
)
def test_settings_that_contradict(reward: dict[str, Any], sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        settings(reward, **sections)


def teaching(folder: str = "teacher", **algorithm: Any) -> dict[str, Any]:
    distillation = {"teacher": {"path": folder}} | algorithm.pop("distillation", {})
    return {"algorithm": {"distillation": distillation, **algorithm}}


def teaching_sets(*names: str, **sections: Any) -> dict[str, Any]:
    """Sets math and code, and a teacher in the folder NAME for each of the names."""
    data = MINIMAL_SETTINGS["data"] | {"train": {"math": "math.jsonl", "code": "code.jsonl"}}
    teacher = {name: {"path": name} for name in names}
    return teaching(distillation={"teacher": teacher}) | {"data": data} | sections


ADDED = {"distillation": {"advantage": "add"}}


URL: dict[str, Any] = {"teacher": {"path": "http://x"}}


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"algorithm": {"distillation": {}}}, "algorithm.distillation.teacher is missing"),
        (
            teaching() | {"schedule": "async", "engine": {"ranks": 1}, "sync": {"pause": "in_place"}},
            "teacher.path=teacher is served in SCORE on the devices of all ranks, which schedule=async has no phase",
        ),
        (
            teaching() | {"rollout": MINIMAL_SETTINGS["rollout"] | {"temperature": 0.7}},
            "rollout.temperature=0.7 changes the policy's: set rollout.temperature=1",
        ),
        (teaching(ratio="sequence"), "distillation differs by token, ratio=sequence does not: set ratio=token"),
        (teaching(filter={"zero_std": "drop"}), "learns from no reward: set filter.zero_std=keep"),
        (teaching(distillation=URL | {"kl_type": "forward"}), "kl_type=forward needs more of the teacher than one"),
        (
            teaching_sets("math", "cod"),
            "teacher.cod: data.train has no set of this name \\(did you mean code\\?\\); there are: math, code",
        ),
        (
            teaching_sets("code"),
            "teacher has no teacher for the set data.train.math: set teacher.math.path, or teacher.path alone",
        ),
        (
            teaching_sets("math", "code", schedule="async", engine={"ranks": 1}, sync={"pause": "in_place"}),
            "teacher.math.path=math is served in SCORE on the devices of all ranks, which schedule=async has no phase",
        ),
        (teaching(distillation={"teacher": {"pat": "x"}}), "unknown setting algorithm.distillation.teacher.pat"),
        (
            teaching(distillation={"teacher": {"math": {"path": "x", "api_key_env": 3}}}),
            "algorithm.distillation.teacher.math.api_key_env: expected",
        ),
        (teaching(distillation={"teacher": {"path": 3}}), "algorithm.distillation.teacher.path: expected"),
        (teaching("self:solution", distillation={"topk": 4}), "as its own teacher has sampled tokens alone: set topk="),
        (teaching(distillation={"teacher": {"path": "self", "args": {"tp_size": 2}}}), "has no server: leave out args"),
        (teaching("self", advantage={"baseline": "critic", "scale": "none"}), "leave out advantage.estimator and dist"),
        (
            teaching("self") | {"rollout": MINIMAL_SETTINGS["rollout"] | {"group_size": 1}},
            "teacher.path=self shows .* answer of the group, and rollout.group_size=1 leaves no other: set 2 or more",
        ),
    ],
)
def test_settings_that_contradict_a_teacher(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        settings({"answer": 1.0}, **sections)


def test_sets_with_equal_teachers_share_a_server(tiny_run: TinyRun, tmp_path: Path) -> None:
    """A folder that cannot be served is named with its set."""
    folders = {"math": tiny_run.model, "code": tmp_path, "logic": tiny_run.model}
    teacher = {name: {"path": str(path)} for name, path in folders.items()}
    data = MINIMAL_SETTINGS["data"] | {"train": dict.fromkeys(folders, "rows.jsonl")}
    chosen = settings({"answer": 1.0}, **teaching(distillation={"teacher": teacher}), data=data)
    assert chosen.algorithm.distillation
    served = served_models(chosen.reward, chosen.algorithm.distillation.teachers)
    assert {name: model.folder for name, model in served.items()} == {
        "teacher.math": tiny_run.model,
        "teacher.code": tmp_path,
    }
    assert refusal(chosen, tiny_run, 2).startswith(f"algorithm.distillation.teacher.code.path={tmp_path}: no Hugging")


def test_what_a_teacher_allows() -> None:
    """Alone it needs no group; beside rewards, what rewards need; elsewhere, any schedule."""
    one = {"rollout": MINIMAL_SETTINGS["rollout"] | {"group_size": 1}}
    settings({"answer": 1.0}, **teaching(), **one)
    settings({"answer": 1.0}, **teaching(**ADDED, filter={"zero_std": "drop"}, kl={"coef": 0.1, "apply_to": "reward"}))
    elsewhere = teaching(distillation={"teacher": {"path": "http://x"}})
    settings({"answer": 1.0}, **elsewhere, schedule="async", engine={"ranks": 1}, sync={"pause": "in_place"})


def refusal(chosen: Settings, tiny_run: TinyRun, ranks: int) -> str:
    with pytest.raises(UserError) as raised:
        check(chosen, tiny_run, ranks, ranks)
    return str(raised.value)


@pytest.fixture
def refused_teacher(tiny_run: TinyRun) -> Callable[..., str]:
    """The sentence about a folder."""

    def check(folder: Path, ranks: int = 2, **teacher: Any) -> str:
        teacher = {"path": str(folder), **teacher}
        return refusal(settings({"answer": 1.0}, **teaching(distillation={"teacher": teacher})), tiny_run, ranks)

    return check


def test_folders_that_are_no_teacher(
    refused_teacher: Callable[..., str], tiny_run: TinyRun, folder: Path, tmp_path: Path
) -> None:
    none = tmp_path / "none"
    section = "algorithm.distillation.teacher"
    assert refused_teacher(none).startswith(f"{section}.path={none}: no Hugging Face folder with a config.json")
    assert "LlamaForSequenceClassification names no causal language model" in refused_teacher(folder)
    assert "args.tp_size=2 does not divide the 3 ranks" in refused_teacher(tiny_run.model, 3, args={"tp_size": 2})
    assert f"{section}.args.dtype cannot be set" in refused_teacher(tiny_run.model, args={"dtype": "float16"})
    copy = shutil.copytree(tiny_run.model, tmp_path / "copy")
    file = copy / "tokenizer.json"
    text = file.read_text()
    tokenizer = json.loads(text)
    tokenizer["model"]["vocab"]["another"] = max(tokenizer["model"]["vocab"].values()) + 1
    file.write_text(json.dumps(tokenizer))
    sentence = refused_teacher(copy)
    assert "its tokenizer is another than the policy's, and it would be sent the policy's tokens (1 of its" in sentence
    assert "is 'another', and the policy's is None): take a teacher of the same family" in sentence
    file.write_text(text)
    for weights in copy.glob("*.safetensors*"):
        weights.unlink()
    assert "it has no weights in Hugging Face's format" in refused_teacher(copy)


def test_a_plan_counts_the_model_in_score_and_its_copy_on_the_host(folder: Path) -> None:
    chosen = settings({"answer": 1.0, "model": {"path": str(folder), "args": {"tp_size": 2}}})
    cluster = read_cluster("h100-80")
    hf = published_config("qwen2.5-7b")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2
    memory = plan_memory(make_job(chosen, hf, cluster, 1))
    plain = plan_memory(make_job(chosen.model_copy(update={"reward": RewardConfig(answer=1.0)}), hf, cluster, 1))
    for sub_phase, sizes in memory.device[0].items():
        assert sizes.get("reward model", 0) == size * (sub_phase is SubPhase.SCORE)
        assert sizes.get("reward model's cache", 0) == (0.8 * cluster.gpu_bytes - size) * (sub_phase is SubPhase.SCORE)
        assert not (sub_phase is SubPhase.SCORE and {"weights", "engine weights", "KV cache"} & sizes.keys())
        assert memory.host[sub_phase]["reward model"] == 8 * size
        assert sizes["contexts"] > plain.device[0][sub_phase]["contexts"]
    assert "reward model" not in plain.device[0][SubPhase.SCORE]


def test_a_server_that_has_ended_stops_the_run_with_its_log(folder: Path, tmp_path: Path) -> None:
    """Its last lines are shown, not only that a request had no answer; groups that wait are not asked about."""
    chosen = settings({"model": {"path": str(folder)}}, run={"folder": str(tmp_path), "steps": 1})
    spec = base_spec(chosen.model, 96, 0, rank=0)
    models = served_models(chosen.reward, {})
    servers = RewardServers(models, spec, tmp_path / "logs", 1, (0,), 600.0)
    asked = list[SampleGroup]()
    servers.launch()

    def finish(group: SampleGroup) -> SampleGroup:
        asked.append(group)
        if group.prompt.index:
            time.sleep(0.2)
            return group
        servers.stop()
        raise UserError("no answer")

    groups = [SampleGroup(Prompt(index, "", (1,)), ()) for index in range(50)]
    with pytest.raises(
        EngineError, match=r"ended while it was to score a step; the last lines of .*reward_model_0\.log"
    ):
        servers.score(groups, finish)
    assert len(asked) < len(groups)


@pytest.fixture
def refused(tiny_run: TinyRun, folder: Path) -> Callable[..., str]:
    """The sentence about the model where its config is changed."""

    def check(ranks: int = 2, **model: Any) -> str:
        return refusal(settings({"model": {"path": str(folder), **model}}), tiny_run, ranks)

    return check


def test_folders_that_are_no_reward_model(
    refused: Callable[..., str], tiny_run: TinyRun, folder: Path, tmp_path: Path
) -> None:
    assert "names no model with a reward head" in refused(path=str(tiny_run.model))
    make_reward_model(tmp_path, tiny_run.model, labels=2)
    assert "it has 2 labels, and a reward is one number" in refused(path=str(tmp_path))
    config = json.loads((folder / "config.json").read_text())
    for change, sentence in (
        ({"architectures": ["NoSuchForSequenceClassification"]}, "the installed SGLang does not serve NoSuchFor"),
        ({"max_position_embeddings": 64}, "it has 64 positions, and a prompt with its response up to 96"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        assert sentence in refused(path=str(tmp_path))
