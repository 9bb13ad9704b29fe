"""Settings: typed, strict, frozen; overrides; units; the resolved form; paths; names of other trainers."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from grpo_mp import platform
from grpo_mp.config import Settings, check_settings, dump_settings, load_settings, load_sft_settings, show_settings
from grpo_mp.config.data_sections import EvalSetConfig
from grpo_mp.config.other_trainers import translate
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.section import Section
from tests.minimal_settings import MINIMAL_SETTINGS

ROLLOUT = MINIMAL_SETTINGS["rollout"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(MINIMAL_SETTINGS))
    return path


def test_what_is_left_out_takes_its_default(file: Path) -> None:
    settings = load_settings(file)
    assert settings == check_settings(MINIMAL_SETTINGS, "here")
    assert settings.layout.tensor == settings.layout.expert == 1
    assert settings.samples_per_step == 32


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        ("rollout.group_size=16", "rollout", "group_size", 16),
        ("sync.bucket_bytes=512MiB", "sync", "bucket_bytes", 512 * 2**20),
        ("layout.virtual_pipeline=null", "layout", "virtual_pipeline", None),
        ("data.eval={held_out: eval.jsonl}", "data", "eval", {"held_out": EvalSetConfig(path="eval.jsonl")}),
        ("engine.args.mem_fraction_static=0.7", "engine", "args", {"mem_fraction_static": 0.7}),
        ("model.path=a=b", "model", "path", Path("a=b")),
        ('data.system_prompt="a # b"', "data", "system_prompt", "a # b"),
        ("data.system_prompt=a\n\nb #### c", "data", "system_prompt", "a\n\nb #### c"),
        ("data.eval={held_out: set #1.jsonl}", "data", "eval", {"held_out": EvalSetConfig(path="set #1.jsonl")}),
    ],
)
def test_overrides(file: Path, override: str, section: str, name: str, value: Any) -> None:
    assert getattr(getattr(load_settings(file, [override]), section), name) == value


def test_an_eval_set_in_one_word_can_be_given_more(file: Path, tmp_path: Path) -> None:
    settings = load_settings(
        file, ["data.eval={a: x.jsonl, b: {path: y.jsonl, max_prompts: 3}}", "data.eval.a.samples=8"]
    )
    assert settings.data.eval == {
        "a": EvalSetConfig(path="x.jsonl", samples=8),
        "b": EvalSetConfig(path="y.jsonl", max_prompts=3),
    }
    (tmp_path / "resolved.yaml").write_text(dump_settings(settings))
    assert load_settings(tmp_path / "resolved.yaml") == settings


def test_engines_hold_the_longest_response_of_all() -> None:
    def longest(**limits: int | None) -> int:
        sets = {name: {"path": "x", "max_response_tokens": limit} for name, limit in limits.items()}
        return check_settings(
            MINIMAL_SETTINGS | {"data": MINIMAL_SETTINGS["data"] | {"eval": sets}}, "here"
        ).max_request_tokens

    assert (longest(), longest(a=None), longest(a=31), longest(a=31, b=50)) == (64 + 32, 64 + 32, 64 + 32, 64 + 50)


@pytest.mark.parametrize("override", ["steps=3", "run.steps", "run.steps=[", ""])
def test_what_is_no_override(file: Path, override: str) -> None:
    with pytest.raises(UserError, match=r"^override "):
        load_settings(file, [override])


def test_the_resolved_form_names_every_setting_and_reads_back_equal(file: Path, tmp_path: Path) -> None:
    settings = load_settings(
        file, ["rollout.stop=[END]", "layout.expert=2", "reward.functions={'a.py:f': 2}", "optimizer.betas=[0.8, 0.9]"]
    )
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_settings(settings))
    assert load_settings(resolved) == settings
    tree = yaml.safe_load(dump_settings(settings))
    assert tree.keys() == Settings.model_fields.keys()
    sections = {name: type(value) for name, value in settings if isinstance(value, Section)}
    assert all(tree[name].keys() == section.model_fields.keys() for name, section in sections.items())


def test_what_is_shown_has_no_logins(file: Path) -> None:
    settings = load_settings(file, ["reward.judge={url: 'https://me:hush-hush@judge:8000/v1', model: large}"])
    assert "hush-hush" in dump_settings(settings)
    assert "https://judge:8000/v1" in show_settings(settings)
    plain = load_settings(file)
    assert show_settings(plain) == dump_settings(plain)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"run": {"folder": "x"}}, "here: run: run.steps is missing: set it, or run.epochs"),
        ({"optimizer": "muon"}, "here: optimizer: muon is not offered, the optimizer is AdamW; Megatron-Core's Muon"),
        (
            {"algorithm": {"policy_loss": "clip_positive"}, "reward": {"functions": {"a.py:f": 1.0}}},
            "policy_loss=clip_positive adds a loss on right answers, and no reward term defines correctness",
        ),
        ({"engine": {"rank": 1}}, "here: unknown setting engine.rank (did you mean engine.ranks?)"),
        (
            {"sync": {"bucket_bytes": "lots"}},
            "sync.bucket_bytes: could not parse value and unit from byte string",
        ),
        (
            {"reward": {"answer": 1, "overlong": {"weight": 1, "buffer_tokens": 32}}},
            "here: reward.overlong.buffer_tokens=32 is not below rollout.max_response_tokens=32: lower it",
        ),
        (
            {"rollout": MINIMAL_SETTINGS["rollout"] | {"group_size": "four"}},
            "group_size: expected an integer, found 'four'",
        ),
        (
            {"monitor": {"loggers": "neptune"}},
            "here: monitor.loggers: unknown logger 'neptune': there are tensorboard, jsonl, wandb, mlflow, trackio; or",
        ),
        (
            {"rollout": MINIMAL_SETTINGS["rollout"] | {"function": "mine.py:play", "max_staleness": 1}},
            "an episode of several turns cannot be paused: set max_staleness=0, or schedule=async or one_step_off",
        ),
        (
            {"rollout": MINIMAL_SETTINGS["rollout"] | {"function": "mine.py:play", "limits": {"episode_s": 7200}}},
            "monitor.phase_timeout_s=3600 is shorter than rollout.limits.episode_s=7200, a wait inside it: raise",
        ),
        (
            {"engine": {"ranks": 2}},
            "engine.ranks=2 keeps ranks for engines alone, and schedule=colocated lets all of them train: set schedule",
        ),
        (
            {"schedule": "one_step_off", "engine": {"ranks": 1}, "rollout": ROLLOUT | {"max_staleness": 2}},
            "rollout.max_staleness=2: with schedule=one_step_off it is 1: leave it out",
        ),
        (
            {"training": {"router_replay": "R3"}, "engine": {"speculative": {"algorithm": "ngram"}}},
            "router_replay=R3 does not work with engine.speculative",
        ),
        (
            {"training": {"router_replay": "R3"}, "schedule": "async", "engine": {"ranks": 1}},
            "sync.pause=retract has SGLang choose them anew at every update: set sync.pause=in_place",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        check_settings(MINIMAL_SETTINGS | changes, "here")
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_every_setting_is_described() -> None:
    """By pydantic's JSON schema, which holds every section once."""
    schema = Settings.model_json_schema()
    sections = {"Settings": schema, **schema["$defs"]}
    assert {"RewardModelConfig", "EvalSetConfig", "KLConfig"} <= sections.keys()  # in a union, in a mapping, two deep
    terse = [
        f"{section}.{name}"
        for section, fields in sections.items()
        for name, setting in fields["properties"].items()
        if len(setting.get("description", "").split()) < 3
    ]
    assert not terse


def test_all_complaints_come_at_once() -> None:
    with pytest.raises(UserError, match=r"run\.steps.*; .*rollout\.group_size"):
        check_settings(
            MINIMAL_SETTINGS
            | {"run": {"folder": "x", "steps": 0}, "rollout": MINIMAL_SETTINGS["rollout"] | {"group_size": 0}},
            "",
        )


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"settings\.yaml: not UTF-8 text"):
        load_settings(path)


@pytest.mark.parametrize(
    ("run", "prompts", "steps"),
    [({"epochs": 2}, 10, 7), ({"epochs": 3}, 9, 9), ({"epochs": 0.1}, 30, 1), ({"steps": 5, "epochs": 2}, 10, 5)],
)
def test_epochs_become_steps_of_the_prompts(run: dict[str, float], prompts: int, steps: int) -> None:
    """Rounded up; what is resolved is read back as it is, and stays."""
    tree = MINIMAL_SETTINGS | {"run": {"folder": "runs/x", **run}}
    tree["rollout"] = MINIMAL_SETTINGS["rollout"] | {"prompts_per_step": 3}
    resolved = check_settings(tree, "test").with_steps(prompts)
    assert resolved.run.steps == steps
    written = yaml.safe_load(dump_settings(resolved))
    assert check_settings(written, "test").with_steps(1000) == resolved


def test_no_dtype_is_that_of_the_machine_that_computes(file: Path) -> None:
    """Plans are of GPUs; who computes says what it is on."""
    assert load_settings(file).model.dtype == "bfloat16"
    assert load_settings(file, dtype="float32").model.dtype == "float32"
    assert load_settings(file, ["model.dtype=null"], dtype="float32").model.dtype == "float32"
    assert load_settings(file, ["model.dtype=bfloat16"], dtype="float32").model.dtype == "bfloat16"
    assert platform.default_dtype() == ("bfloat16" if torch.cuda.is_available() else "float32")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/mia")
    monkeypatch.setenv("DISK", "/scratch/7")
    monkeypatch.delenv("NO_SUCH", raising=False)


def read(section: str, name: str, value: Any) -> Settings:
    tree = copy.deepcopy(MINIMAL_SETTINGS)
    tree.setdefault(section, {})[name] = value
    return check_settings(tree, "here")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("~/runs/x", "/home/mia/runs/x"),
        ("$DISK/x", "/scratch/7/x"),
        ("${DISK}/x_$HOME", "/scratch/7/x_/home/mia"),
        ("runs/~x", "runs/~x"),
    ],
)
def test_every_kind_of_path_is_expanded(text: str, path: str) -> None:
    assert read("run", "folder", text).run.folder == Path(path)
    assert read("data", "train", text).data.train["train"].path == path
    assert read("data", "eval", {"held": {"path": text}}).data.eval["held"].path == path
    mixture = {"a": {"path": text, "pass_rates": text}, "b": "rows.jsonl"}
    assert read("data", "train", mixture).data.train["a"].pass_rates == path
    assert read("data", "source", f"{text}/a.py:rows").data.source == f"{path}/a.py:rows"


def test_files_of_code_and_arguments_are_expanded_wherever_they_stand() -> None:
    assert read("rollout", "function", "$DISK/a.py:f").rollout.function == "/scratch/7/a.py:f"
    loggers = {"~/a.py:Log": {"folder": "~/logs", "title": "5$ of ~me"}}
    assert read("monitor", "loggers", loggers).monitor.loggers == {
        "/home/mia/a.py:Log": {"folder": "/home/mia/logs", "title": "5$ of ~me"}
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("$NO_SUCH/x", r"run\.folder: the environment variable NO_SUCH in '\$NO_SUCH/x' is not set"),
        ("${NO_SUCH}", r"the environment variable NO_SUCH "),
    ],
)
def test_what_cannot_be_expanded_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        read("run", "folder", text)


def test_files_overrides_and_sft_expand_too_and_the_resolved_settings_are_full(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump(MINIMAL_SETTINGS))
    settings = load_settings(file, ["run.folder=~/x", "data.train=$DISK/a.jsonl"])
    text = dump_settings(settings)
    assert "/home/mia/x" in text
    assert "/scratch/7/a.jsonl" in text
    kept = {name: MINIMAL_SETTINGS[name] for name in ("run", "model", "optimizer")}
    file.write_text(yaml.safe_dump({**kept, "data": {"train": "~/a.jsonl"}, "sft": {"batch_size": 1, "max_tokens": 9}}))
    assert load_sft_settings(file).data.train["train"].path == "/home/mia/a.jsonl"


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("rollout.n", "verl's rollout.n is rollout.group_size here"),
        ("rollout.num_generations", "TRL's num_generations is rollout.group_size here"),
        ("actor.clip_ratio_low", "verl's actor.clip_ratio_low is algorithm.clip.low here"),
        ("training.rollout_batch_size", "slime's --rollout-batch-size is rollout.prompts_per_step here"),
        ("steps_per_generation", "TRL's steps_per_generation is training.updates_per_step here"),
        ("reward.path", ""),
        ("algorithm.rollout_correction", ""),  # verl's name, too
        ("rollout.group_sise", ""),
    ],
)
def test_a_setting_of_another_trainer(written: str, sentence: str) -> None:
    assert translate(written) == sentence


def test_an_unknown_section_names_each_setting_below_it() -> None:
    with pytest.raises(UserError) as error:
        check_settings({**MINIMAL_SETTINGS, "trainer": {"total_training_steps": 10, "logger": ["console"]}}, "my.yaml")
    assert str(error.value) == (
        "my.yaml: unknown setting trainer: verl's trainer.total_training_steps is run.steps here; "
        "verl's trainer.logger is monitor.loggers here"
    )
