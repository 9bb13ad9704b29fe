"""What `grpo-mp watch` shows of written-out runs, also in a real terminal."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from grpo_mp.cli.main import main
from grpo_mp.monitor.rules import find_warnings
from grpo_mp.monitor.watch import sparkline

STEPS = 30
LIMIT_S = 120.0
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def metrics_of(step: int) -> dict[str, float | None]:
    return {
        "step": step,
        "reward/mean": step / STEPS,
        "train/grad_norm": None if step == STEPS else 1.0,
        "time/step_s": 2.0,
        "eval/arithmetic/accuracy": 0.5,
        "rollout/truncated_ratio": 0.9,
        "of/another version": 1.0,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 40 steps, 30 of which are done."""
    folder = tmp_path / "run"
    (folder / "samples").mkdir(parents=True)
    (folder / "settings.yaml").write_text("run: {steps: 40}\n")
    lines = [json.dumps(metrics_of(step)) for step in range(1, STEPS + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 31, "torn')
    texts = {"[red]two": 8.0, "between": 5.0, "\x1b[31mred": 1.0}
    answers = [{"prompt": "how many?", "response": text, "reward": reward} for text, reward in texts.items()]
    (folder / "samples" / "step_000030.jsonl").write_text("\n".join(map(json.dumps, answers)) + "\n")
    (folder / "samples" / "step_000004.jsonl").write_text("")
    return folder


def test_a_run_that_is_running(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    assert main(["watch", str(run), "--once"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"step 30/40\s+\d s since the last step\s+about 20 s left", said)
    assert re.search(r"reward +▁.*█ +1\.000 +0\.033 - 1\.000", said)
    assert re.search(r"gradient .* no number", said)
    assert re.search(r"eval arithmetic .* 50\.0%", said)
    (warning,) = [one for one in find_warnings(map(metrics_of, range(STEPS))) if one.rule == "truncation"]
    assert warning.sentence in said
    assert warning.advice[:60] in said
    assert "samples of step 30" in said
    assert re.search(r"8\.00 +\[red\]two", said)
    assert re.search(r"1\.00 +\[31mred", said)
    assert "between" not in said
    assert "\x1b" not in said


def test_a_run_that_has_not_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "later"), "--once"]) == 0
    assert "waiting for its settings.yaml" in " ".join(capsys.readouterr().out.split())


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 8, 8, float("nan"), float("nan")], 3) == "▁█ "
    assert sparkline([3.0], 10) == "▁"
    assert sparkline([], 10) == sparkline([float("nan")], 10).strip() == ""
    assert len(sparkline(range(1000), 60)) == 60


def read_until(terminal: int, what: str, seen: bytearray) -> None:
    deadline = time.monotonic() + LIMIT_S
    while what.encode() not in seen and what not in ANSI.sub("", seen.decode(errors="replace")):
        assert time.monotonic() < deadline, seen.decode(errors="replace")
        seen += os.read(terminal, 65536)


@pytest.mark.slow
def test_a_real_terminal_that_is_resized_and_left(run: Path) -> None:
    """A new width shows in the next frame; Ctrl-C leaves the former screen and no trace."""
    terminal, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, 90))
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    command = [sys.executable, "-m", "grpo_mp", "watch", str(run)]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    seen = bytearray()
    try:
        read_until(terminal, "╭─ curves " + "─" * 79 + "╮", seen)
        termios.tcsetwinsize(terminal, (50, 60))
        read_until(terminal, "╭─ curves " + "─" * 49 + "╮", seen)
        with (run / "metrics.jsonl").open("a") as lines:
            lines.write('": 0}\n' + json.dumps(metrics_of(32)) + "\n")
        read_until(terminal, "step 32/40", seen)
        process.send_signal(signal.SIGINT)
        read_until(terminal, "\x1b[?1049l", seen)  # the terminal's own screen again
        assert process.wait(LIMIT_S) == 0
        assert b"Traceback" not in seen
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
