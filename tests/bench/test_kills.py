"""The benches of kills and of a soak: their short form, and what they take for a failure."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.checkpoint.run_state import ROLLOUTS
from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.rollout.groups import PausedGroup
from grpo_mp.rollout.journal import GroupJournal
from grpo_mp.utils.types import Prompt, Sample, SampleGroup
from tests.bench import kills, soak


@pytest.mark.nightly
def test_a_run_whose_processes_are_killed_says_what_an_undisturbed_one_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the bench goes on where it was stopped, and fails where a run says something else."""
    short = ["--steps", "3", "--schedule", "tools", "--folder", str(tmp_path / "bench")]
    kills.main([*short, "--kills", "1"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("PASSED: 1 of 1 kills")
    found = kills.Found.read(tmp_path / "bench" / kills.FOUND)
    assert found.kills.total() == 1
    kills.main([*short, "--kills", "1"])  # all are done
    assert capsys.readouterr().out.splitlines()[-1].startswith("PASSED: 1 of 1 kills")


def test_what_a_kill_found_on_disk_must_not_be_generated_again(tmp_path: Path) -> None:
    """An episode of a group that was not finished, and a finished group."""
    for name in ("train", "eval"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": f"of {name}"}) + "\n")

    def begin(text: str, index: int, step: int = 2) -> None:
        with (tmp_path / kills.BEGUN).open("a") as lines:
            lines.write(f"{step}\t{text}\t0\t{index}\n")

    prompt = Prompt(0, "of train", (5,))
    journal = GroupJournal(tmp_path / "run" / ROLLOUTS, 0)
    ended = [Sample(0, i, (5,), (6,), (0.0,), (0,), False, text=f"{i}", state="completed") for i in range(4)]
    for index in range(3):
        begin("of train", index)
    journal.append(2, 0, PausedGroup(prompt, samples=(ended[1],)), RewardStats(), kept=False)
    first = kills.Kill.of(tmp_path, tmp_path / "run")
    begin("of train", 0)
    begin("of eval", 1)
    assert first.repeated(tmp_path) == []
    begin("of train", 1)
    assert first.repeated(tmp_path) == ["train/0/0/1"]

    journal.append(2, 0, SampleGroup(prompt, tuple(ended)), RewardStats(), kept=True)
    second = kills.Kill.of(tmp_path, tmp_path / "run")
    assert second.repeated(tmp_path) == []
    scope: dict[str, Any] = {"__file__": str(tmp_path / "reward.py")}
    exec(kills.REWARD, scope)
    scope["letters"]([one.text for one in ended])
    assert len(second.repeated(tmp_path)) == 1


def test_a_soak_fails_where_something_grows_or_differs(capsys: pytest.CaptureFixture[str]) -> None:
    flat = [{"memory": 1e9 + 1e6 * (number % 3), "threads": 40.0} for number in range(12)]
    soak.report(soak.Soak(flat, kills=11, starts=6), 100, [])
    assert "PASSED: 11 kills in 100 steps" in capsys.readouterr().out
    leaking = [usage | {"threads": 40.0 + 2 * number} for number, usage in enumerate(flat)]
    for usages, different in ((leaking, []), (flat, ["step 7: reward/mean"])):
        with pytest.raises(SystemExit):
            soak.report(soak.Soak(usages, kills=11, starts=6), 100, different)
        assert capsys.readouterr().out.splitlines()[-1] == "FAILED: 1 failures"
