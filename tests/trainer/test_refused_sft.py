"""What supervised fine-tuning refuses before a process group exists: one sentence, status 2, nothing written."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from grpo_mp.checkpoint.run_state import (
    METRICS,
)
from grpo_mp.config import dump_settings, load_sft_settings
from grpo_mp.sft import main
from tests.conftest import TinyRun

Start = Callable[..., tuple[int, str, str]]
ROWS = [{"prompt": "1+2?", "completion": "3"}] * 8


@pytest.fixture
def start(tiny_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Start:
    """Check settings laid over the smallest; returns status, output and error."""
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings = {
        "run": {"folder": str(tmp_path / "run")},
        "model": {"path": str(tiny_run.model), "dtype": "float32"},
        "data": {"train": str(tmp_path / "chats.jsonl"), "eval": {"same": str(tmp_path / "chats.jsonl")}},
        "sft": {"batch_size": 4, "epochs": 3, "max_tokens": 64},
        "optimizer": {"lr": 1e-3},
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(settings))

    def check(*overrides: str) -> tuple[int, str, str]:
        before = sorted(tmp_path.rglob("*"))
        try:
            main([str(tmp_path / "sft.yaml"), *overrides, "--dry-run", "--ranks", "2"])
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        assert sorted(tmp_path.rglob("*")) == before
        return status, *capfd.readouterr()

    return check


def test_a_dry_run_shows_the_data_and_what_is_learned_of_it(start: Start) -> None:
    status, out, err = start()
    assert (status, err) == (0, "")
    assert "\n  steps: 6\n" in out
    assert "train samples: 8 (0 left out, longer than 64 tokens); 9 tokens each, up to 9, 22% of them learned; " in out
    assert "eval: 8 of same\n" in out
    assert "6 steps of 4 samples: 3.00 epochs" in out
    assert "'<|user|>1+2?<|im_end|><|assistant|>[[3<|im_end|>]]'" in out


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("sft.batch_sise=4", "unknown setting sft.batch_sise (did you mean sft.batch_size?)"),
        ("rollout.group_size=4", "rollout belongs to RL"),
        ("sft.batch_size=9", "8 samples fit, a step takes sft.batch_size=9"),
        ("sft.max_tokens=4096", "sft.max_tokens = 4096, but the model has only 1024 positions"),
        ("sft.max_tokens=8", "all 8 chats are longer than sft.max_tokens=8: raise it"),
        ("data.train=none.jsonl", "none.jsonl: no such file: set data.train or data.eval to an existing one"),
        ("data.prompt_column=question", "no column messages"),
        ("layout.tensor=3", "layout"),
        ("training.megatron_args={moe_aux_loss_coef: 1}", "training.megatron_args.moe_aux_loss_coef: no field of"),
        ("monitor.guards={sft/los: {max: 9}}", "(did you mean sft/loss?)"),
        ("model.path=nowhere", "nowhere"),
    ],
)
def test_mistakes_are_one_sentence(override: str, sentence: str, start: Start) -> None:
    status, out, err = start(override)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ")
    assert sentence in err


def test_a_folder_of_other_settings_is_refused(start: Start, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / METRICS).write_text("{}\n")
    settings = yaml.safe_load(dump_settings(load_sft_settings(tmp_path / "sft.yaml")))
    (run / "settings.yaml").write_text(yaml.safe_dump(settings | {"sft": settings["sft"] | {"batch_size": 2}}))
    status, _, err = start()
    assert status == 2
    assert "holds a run of other settings (sft.batch_size was 2, is now 4)" in err
    (run / "settings.yaml").write_text(yaml.safe_dump(settings | {"sft": settings["sft"] | {"epochs": 2}}))
    assert start()[0] == 0  # more epochs may be asked for
