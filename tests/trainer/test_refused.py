"""What a user can get wrong before a process group exists: one sentence, status 2, nothing written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mp.checkpoint.run_state import (
    TrainState,
    begin_checkpoint,
    checkpoint_folder,
    claim_run_folder,
    write_manifest,
)
from grpo_mp.config import dump_settings, load_settings
from grpo_mp.sft import main as sft
from grpo_mp.train import main
from tests.conftest import TinyRun

Refuse = Callable[..., str]


@pytest.fixture
def model(tiny_run: TinyRun, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to be damaged."""
    return Path(shutil.copytree(tiny_run.model, tmp_path / "model"))


@pytest.fixture
def refuse(tiny_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Refuse:
    """Start with settings laid over the tiny run's; returns the one sentence that comes of it."""

    def start(*overrides: str) -> str:
        files = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as raised:
            main([str(tiny_run.config), f"run.folder={tmp_path / 'run'}", *overrides, "--dry-run", "--ranks", "2"])
        out, err = capfd.readouterr()
        assert raised.value.code == 2
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == files
        return err.removeprefix("error: ").rstrip()

    return start


# -- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("rollout.group_sise=4", "unknown setting rollout.group_sise (did you mean rollout.group_size?)"),
        ("rollout.group_size=many", "rollout.group_size: expected an integer, found 'many'"),
        ("layout.expert=3", "layout: expert_tensor x expert x pipeline = 3 does not divide the 2 ranks: "),
        ("model.path=none", "(hf download OWNER/NAME --local-dir none)"),
        ("training.updates_per_step=3", "training.updates_per_step=3 does not divide the 16 samples of a step"),
        ("sync.bucket_bytes=4KiB", "a quarter of it is a round of the weight sync, and decoder.layers.0.mlp"),
        ("engine.args={mem_fraction: 0.5}", "engine.args.mem_fraction: the installed SGLang has no such argument (did"),
        (
            "training.megatron_args={moe_aux_loss_coef: 1}",
            "training.megatron_args.moe_aux_loss_coef: no field of Megatron's",
        ),
        (
            "training={router_replay: R2, updates_per_step: 1}",
            "training.router_replay=R2 replays the experts of the old-logprob pass, which this run does not make",
        ),
        ("rollout.max_response_tokens=4000", "= 4064, but the model has only 1024 positions"),
        ("algorithm.policy_loss=clp", "algorithm.policy_loss: unknown policy loss 'clp' (did you mean clip?)"),
        ("reward.functions={'no_such_module:f': 1.0}", "importing no_such_module failed: ModuleNotFoundError"),
        ("rollout.max_prompt_tokens=4", "all 60 prompts are longer than rollout.max_prompt_tokens=4"),
    ],
)
def test_settings(refuse: Refuse, override: str, sentence: str) -> None:
    assert sentence in refuse(override)


def test_tools_that_give_no_reward(tiny_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tools = Path(__file__).parents[1] / "rollout" / "light_tools.py"
    settings = (f"rollout.tools=['{tools}:rows']", "rollout.tool_parser=pythonic", "reward.episode=1")
    with pytest.raises(SystemExit, match="2"):
        main([str(tiny_run.config), f"run.folder={tmp_path / 'run'}", *settings, "--dry-run", "--ranks", "2"])
    sentence = capfd.readouterr().err.splitlines()[-1]
    assert sentence.startswith(
        "error: reward.episode is the weight of the reward that get_reward of a class in rollout.tools"
    )


def test_ranks_that_were_not_started(tiny_run: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main([str(tiny_run.config), "--ranks", "2"])
    sentence = "--ranks 2, but no launcher started others: WORLD_SIZE=1: start 2, or omit --ranks"
    assert (raised.value.code, capfd.readouterr().err) == (2, f"error: {sentence}\n")


# -- model folders -------------------------------------------------------------------------------------------


def test_a_safetensors_file_that_is_cut_short(refuse: Refuse, model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    message = refuse(f"model.path={model}")
    assert message.startswith(f"{file} is damaged or not a safetensors file")
    assert message.endswith("copy it again")


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("chat_template.jinja", "the tokenizer has no chat template: add chat_template.jinja"),
        ("tokenizer.json", "the tokenizer cannot be read"),
        ("model.safetensors", "contains neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_a_file_that_is_missing(refuse: Refuse, model: Path, file: str, sentence: str) -> None:
    (model / file).unlink()
    assert sentence in refuse(f"model.path={model}")


def copy_with_other_tokens(model: Path, folder: Path) -> None:
    """Copy a folder, but for two tokens that change places."""
    shutil.copytree(model, folder)
    tokens = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (folder / "tokenizer.json").write_text(json.dumps(tokens))


def test_a_critic_of_another_tokenizer(refuse: Refuse, tiny_run: TinyRun, tmp_path: Path) -> None:
    folder = tmp_path / "critic"
    copy_with_other_tokens(tiny_run.model, folder)
    error = refuse("algorithm=ppo", f"critic.path={folder}")
    assert f"critic.path={folder}: its tokenizer is another than the policy's" in error


# -- data ----------------------------------------------------------------------------------------------------

GOOD_ROW = '{"question": "Tom has 3 eggs.", "answer": "3"}\n'


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            '{"prompt": "x", "answer": "1"}\n',
            "train.jsonl, line 1: no column question, the row has: prompt, answer: set",
        ),
        (GOOD_ROW, "1 prompts fit, a step takes rollout.prompts_per_step=4"),
    ],
)
def test_data(refuse: Refuse, tmp_path: Path, rows: str, sentence: str) -> None:
    (tmp_path / "train.jsonl").write_text(rows)
    assert sentence in refuse(f"data.train={tmp_path / 'train.jsonl'}")


@pytest.mark.parametrize("option", ["data.train", "data.eval.arithmetic"])
def test_rows_that_a_reward_cannot_score(refuse: Refuse, tmp_path: Path, option: str) -> None:
    complete = GOOD_ROW.replace("}", ', "level": 1, "tests": "assert f"}') * 4
    (tmp_path / "good.jsonl").write_text(complete)
    (tmp_path / "rows.jsonl").write_text(complete + GOOD_ROW)
    files = f"data.train={tmp_path / 'good.jsonl'}", f"{option}={tmp_path / 'rows.jsonl'}"
    location = f"{tmp_path / 'rows.jsonl'}, line 5:"
    assert f"{location} no column tests, the row has: question, answer" in refuse(*files, "reward.code={}")


# -- run folders ---------------------------------------------------------------------------------------------


@pytest.fixture
def saved_run(tiny_run: TinyRun, tmp_path: Path) -> Path:
    """A run folder with a checkpoint after step 2, whose policy is one small file."""
    run = tmp_path / "run"
    claim_run_folder(run, dump_settings(load_settings(tiny_run.config, [f"run.folder={run}"])))
    checkpoint = checkpoint_folder(run, 2)
    begin_checkpoint(checkpoint)
    (checkpoint / "policy").mkdir()
    (checkpoint / "policy" / "rank_00000.bin").write_bytes(b"weights")
    write_manifest(checkpoint, TrainState(step=2))
    return run


def test_a_folder_of_other_settings(refuse: Refuse, saved_run: Path) -> None:
    message = refuse("optimizer.eps=0.5")
    assert message.startswith(f"{saved_run} holds a run of other settings (optimizer.eps was 1e-08, is now 0.5)")
    assert message.endswith("choose another run.folder, or move it away")


def test_checkpoints_without_resume(refuse: Refuse, saved_run: Path) -> None:
    assert "has checkpoints of this run: set run.resume=auto" in refuse("run.resume=never")


def test_a_torn_checkpoint_to_resume_from(refuse: Refuse, saved_run: Path) -> None:
    (saved_run / "checkpoints" / "step_000002" / "policy" / "rank_00000.bin").write_bytes(b"weigh")
    message = refuse()
    assert "step_000002: damaged checkpoint, policy/rank_00000.bin is missing or cut short: copy it again" in message
    assert message.endswith("or rename step_000002 to resume from the one before")


def test_an_export_that_would_take_the_place_of_its_source(refuse: Refuse, tiny_run: TinyRun, tmp_path: Path) -> None:
    shutil.copytree(tiny_run.model, tmp_path / "run" / "final")
    words = "the export would take the place of model.path: choose another run.folder, or set run.export=false"
    assert words in refuse(f"model.path={tmp_path / 'run' / '..' / 'run' / 'final'}")


def test_what_may_change_between_attempts(
    saved_run: Path, tiny_run: TinyRun, capfd: pytest.CaptureFixture[str]
) -> None:
    changed = ("run.steps=9", "run.save_every=5")
    main([str(tiny_run.config), f"run.folder={saved_run}", *changed, "--dry-run", "--ranks", "2"])
    assert capfd.readouterr().err == ""


# -- dry runs ------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_would_run_and_writes_nothing(
    tiny_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    start = [str(tiny_run.config), f"run.folder={run}", "--dry-run", "--ranks", "4", "layout.tensor=2"]
    main([*start, "--all"])
    out, err = capfd.readouterr()
    facts, _, settings = out.partition("\n\n")
    (tmp_path / "resolved.yaml").write_text(settings)
    assert load_settings(tmp_path / "resolved.yaml") == load_settings(
        tiny_run.config, [f"run.folder={run}", "layout.tensor=2"]
    )
    main(start)
    changed = capfd.readouterr().out.partition("\n\n")[2]
    assert "  tensor: 2\n" in changed
    assert "virtual_pipeline" in settings
    assert "virtual_pipeline" not in changed
    assert (
        "ranks: 4, 4 on each node; layout: tensor=2, pipeline=1, context=1, expert=2, expert_tensor=1, data=2" in facts
    )
    assert "engines: 4 x 1 rank(s), hosted by ranks (0, 1, 2, 3)" in facts
    assert "train prompts: 60 (0 longer than the limit left out); eval: 6 of arithmetic" in facts
    assert "a step: 4 prompts x 4 = 16 samples, 2 updates of 8" in facts
    assert "first prompt, as the policy reads it: '<|user|>" in facts
    assert "nothing was started" in facts
    assert err == ""
    assert not run.exists()


# -- supervised fine-tuning ----------------------------------------------------------------------------------


def test_a_dry_run_of_sft_shows_the_data_and_what_is_learned_of_it(
    tiny_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One with a mistake ends with a sentence."""
    (tmp_path / "chats.jsonl").write_text((json.dumps({"prompt": "1+2?", "completion": "3"}) + "\n") * 8)
    settings: dict[str, Any] = {
        "run": {"folder": str(tmp_path / "run"), "epochs": 3},
        "model": {"path": str(tiny_run.model), "dtype": "float32"},
        "data": {"train": str(tmp_path / "chats.jsonl"), "eval": {"same": str(tmp_path / "chats.jsonl")}},
        "sft": {"batch_size": 4, "max_tokens": 64},
        "optimizer": {"lr": 1e-3},
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(settings))
    before = sorted(tmp_path.rglob("*"))
    sft([str(tmp_path / "sft.yaml"), "--dry-run", "--ranks", "2"])
    out, err = capfd.readouterr()
    assert err == ""
    assert "\n  steps: 6\n" in out
    assert "train samples: 8 (0 left out, longer than 64 tokens); 9 tokens each, up to 9, 22% of them learned; " in out
    assert "eval: 8 of same\n" in out
    assert "6 steps of 4 samples: 3.00 epochs" in out
    assert "'<|user|>1+2?<|im_end|><|assistant|>[[3<|im_end|>]]'" in out
    with pytest.raises(SystemExit) as ended:
        sft([str(tmp_path / "sft.yaml"), "sft.batch_size=9", "--dry-run", "--ranks", "2"])
    out, err = capfd.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert "8 samples fit, a step takes sft.batch_size=9" in err
    assert sorted(tmp_path.rglob("*")) == before
