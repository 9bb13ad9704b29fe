"""Settings: typed, strict, frozen; overrides; units; the resolved form."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from grpo_mp import platform
from grpo_mp.config import Settings, check_settings, dump_settings, load_settings, show_settings
from grpo_mp.config.data_sections import EvalSetConfig
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.section import Section, parse_bytes
from tests.minimal_settings import MINIMAL_SETTINGS

ROLLOUT = MINIMAL_SETTINGS["rollout"]


def of_eval(**settings: Any) -> dict[str, Any]:
    """The data section with one eval set."""
    return {"data": {"train": "x", "eval": {"a": {"path": "x"} | settings}}}


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
        ("optimizer.lr=1e-5", "optimizer", "lr", 1e-5),
        ("sync.bucket_bytes=512MiB", "sync", "bucket_bytes", 512 * 2**20),
        ("layout.virtual_pipeline=null", "layout", "virtual_pipeline", None),
        ("data.eval={held_out: eval.jsonl}", "data", "eval", {"held_out": EvalSetConfig(path="eval.jsonl")}),
        ("rollout.stop=[END, STOP]", "rollout", "stop", ("END", "STOP")),
        ("engine.args.mem_fraction_static=0.7", "engine", "args", {"mem_fraction_static": 0.7}),
        ("model.path=a=b", "model", "path", Path("a=b")),
        ("reward.on_error=-1", "reward", "on_error", -1.0),
        ("data.system_prompt=Write it after ####.", "data", "system_prompt", "Write it after ####."),
        ("data.system_prompt=#1\n  and #2", "data", "system_prompt", "#1\n  and #2"),
        ('data.system_prompt="a # b"', "data", "system_prompt", "a # b"),
        ("model.path=runs/try #2", "model", "path", Path("runs/try #2")),
        ("rollout.stop=[a #, '# b']", "rollout", "stop", ("a #", "# b")),
    ],
)
def test_overrides(file: Path, override: str, section: str, name: str, value: Any) -> None:
    assert getattr(getattr(load_settings(file, [override]), section), name) == value


def test_a_later_override_wins_and_reaches_deep(file: Path) -> None:
    settings = load_settings(file, ["algorithm.kl.coef=0.1", "algorithm.kl.coef=0.2"])
    assert settings.algorithm.kl.coef == 0.2


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
    "reward",
    [
        {"overlong": {"weight": 1, "buffer_tokens": 31}},
        {"repetition": 0.5},
        {"model": {"url": "http://127.0.0.1:30000"}},
        {"code": {"memory_bytes": "1GiB"}},
        {"steps": "mine:steps", "boxed": 0.5},
        {"functions": {"mine:rule": 1.0}, "correct": "rule"},
    ],
)
def test_each_reward_is_enough_and_reads_back_equal(reward: dict[str, Any], tmp_path: Path) -> None:
    settings = check_settings(MINIMAL_SETTINGS | {"reward": reward}, "here")
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_settings(settings))
    assert load_settings(resolved) == settings


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"run": {"folder": "x"}}, "here: run: run.steps is missing: set it, or run.epochs"),
        ({"engine": {"rank": 1}}, "here: unknown setting engine.rank (did you mean engine.ranks?)"),
        (
            {"sync": {"bucket_bytes": "lots"}},
            "sync.bucket_bytes: 'lots' is not a number of bytes: write 512MiB, 1GiB or a",
        ),
        (
            {"reward": {"answer": 1, "overlong": {"weight": 1, "buffer_tokens": 32}}},
            "here: reward.overlong.buffer_tokens=32 is not below rollout.max_response_tokens=32: lower it",
        ),
        (
            {"reward": {"model": {"weight": 1}}},
            "here: reward: reward.model: set url, where a reward model is served, or folder",
        ),
        ({"training": {"updates_per_step": 5}}, "here: training.updates_per_step=5 does not divide the 32"),
        (
            {"reward": {"boxed": 1}, "algorithm": {"curriculum": {"window": 2, "max_rate": 0.9}}},
            "here: algorithm.curriculum.window skips prompts that are answered right, and no reward term",
        ),
        (
            {"reward": {"boxed": 1}, "algorithm": "dapo"},
            "here: algorithm.filter.metric=accuracy drops groups that are all right or all wrong, and no reward",
        ),
        (
            of_eval(samples=2, temperature=0),
            "at temperature 0 the 2 samples of a problem are all the same: set samples",
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
            {"reward": {"answer": 1, "functions": {"mine.py:even": 1}, "correct": "evn"}},
            "reward.correct: no term of the reward is named 'evn' (did you mean even?); there are: answer, even",
        ),
        (
            {"rollout": MINIMAL_SETTINGS["rollout"] | {"tools": ["mine.py:add"]}},
            "rollout.tools needs rollout.tool_parser, the name by which SGLang knows how the model writes calls",
        ),
        (
            {"rollout": MINIMAL_SETTINGS["rollout"] | {"function": "mine.py:play", "max_staleness": 1}},
            "an episode of several turns cannot be paused: set max_staleness=0, or schedule=async or one_step_off",
        ),
        (
            {"rollout": MINIMAL_SETTINGS["rollout"] | {"function": "mine.py:play", "limits": {"episode_s": 7200}}},
            "monitor.phase_timeout_s=3600 is shorter than rollout.limits.episode_s=7200, a wait inside it: raise",
        ),
        ({"reward": {"episode": 1.0}}, "reward.episode weighs what rollout.function gives, and there is none"),
        (
            {"rollout": MINIMAL_SETTINGS["rollout"] | {"group_timeout_s": 7200}},
            "here: monitor.phase_timeout_s=3600 is shorter than rollout.group_timeout_s=7200, a wait inside it: raise",
        ),
        (
            {"optimizer": {"lr": 1e-6, "offload": "host"}, "model": {"path": "x", "dtype": "float32"}},
            "optimizer.offload=host needs model.dtype=bfloat16",
        ),
        (
            {"training": {"share_prompts": True}, "layout": {"context": 2}},
            "training.share_prompts does not work with context parallelism (layout.context=2): set share_prompts=false",
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
            {"schedule": "async", "engine": {"ranks": 1}, "rollout": ROLLOUT | {"max_staleness": 0}},
            "rollout.max_staleness=0: with schedule=async it is at least 1: leave it out",
        ),
        (
            {"rollout": ROLLOUT | {"tokens_ahead": 8}},
            "rollout.tokens_ahead=8, and no step begins groups of a later one: set rollout.max_staleness=1 or more, or "
            "leave it out",
        ),
        (
            {"training": {"router_replay": "R2"}},
            "training.router_replay=R2 replays the experts of the old-logprob pass, which this run does not make",
        ),
        (
            {"training": {"router_replay": "R3"}, "schedule": "async", "engine": {"ranks": 1}},
            "sync.pause=retract has SGLang choose them anew at every update: set sync.pause=in_place",
        ),
        (
            {"reward": {"judge": {"url": "http://a", "model": "m", "timeout_s": 2000}}},
            "monitor.phase_timeout_s=3600 is shorter than reward.judge.timeout_s with retries=6004.5, a wait inside it",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        check_settings(MINIMAL_SETTINGS | changes, "here")
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("schedule", "staleness"), [("colocated", 0), ("one_step_off", 1), ("async", 1)])
def test_staleness_follows_from_the_schedule(schedule: str, staleness: int) -> None:
    engine = {"ranks": 0 if schedule == "colocated" else 2}
    settings = check_settings(MINIMAL_SETTINGS | {"schedule": schedule, "engine": engine}, "here")
    assert settings.rollout.max_staleness == staleness
    assert settings.shares_devices == (schedule == "colocated")


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
    ("text", "size"), [("1KiB", 1024), ("1.5MiB", 3 * 2**19), ("2GiB", 2**31), ("77", 77), ("0.5GiB", 2**29)]
)
def test_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["1GB", "-5", ""])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a number of bytes|could not convert"):
        parse_bytes(text)


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
