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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from grpo_mp.cli.main import main
from grpo_mp.monitor.rules import find_warnings
from grpo_mp.monitor.timeline import RankPhase, Timeline, current_phase
from grpo_mp.monitor.watch import RunState, frame, name_ranges, read_state, sparkline
from grpo_mp.rollout.engine_load import EngineLoad, append_load, load_file
from grpo_mp.utils.errors import UserError

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
    """A run of 40 steps, 30 of which are done; its only rank is this process, in GENERATE."""
    folder = tmp_path / "run"
    (folder / "processes").mkdir(parents=True)
    (folder / "samples").mkdir()
    (folder / "settings.yaml").write_text("run: {steps: 40}\n")
    lines = [json.dumps(metrics_of(step)) for step in range(1, STEPS + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 31, "torn')
    me = {"host": os.uname().nodename, "pid": os.getpid(), "started_s": psutil.Process().create_time() + 1}
    (folder / "processes" / "rank_0.json").write_text(json.dumps(me))
    texts = {"[red]two": 8.0, "between": 5.0, "\x1b[31mred": 1.0}
    answers = [{"prompt": "how many?", "response": text, "reward": reward} for text, reward in texts.items()]
    (folder / "samples" / "step_000030.jsonl").write_text("\n".join(map(json.dumps, answers)) + "\n")
    (folder / "samples" / "step_000004.jsonl").write_text("")
    file = load_file(folder, 2)
    for second in range(4):
        append_load(file, EngineLoad(time.time() - 4 + second, "works", 7, 3, 0.25, 100.0 * second, 1.0))
    return folder


@pytest.fixture
def in_generate(run: Path) -> Iterator[Path]:
    timeline = Timeline(run, 0)
    with timeline.span("TRAIN"):
        pass
    with timeline.span("GENERATE"):
        timeline.counter("engine 2 requests", {"running": 1})
        yield run


def shown(state: RunState, width: int = 200) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"), highlight=False)  # noqa: SIM115
    console.print(frame(state))
    return console.export_text()


def test_a_run_that_is_running(
    in_generate: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    assert main(["watch", str(in_generate), "--once"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"runs\s+step 30/40\s+about 20 s\s+left", said)
    assert re.search(r"reward +▁.*█ +1\.000 +0\.033 - 1\.000", said)
    assert re.search(r"gradient .* no number", said)
    assert re.search(r"eval arithmetic .* 50\.0%", said)
    assert re.search(r"GENERATE +\d+ s +0\b", said)
    assert re.search(r" 2 +7 +3 +25% +300 +\d s ago", said)
    (warning,) = [one for one in find_warnings(map(metrics_of, range(STEPS))) if one.rule == "truncation"]
    assert warning.sentence in said
    assert warning.advice[:60] in said
    assert "samples of step 30" in said
    assert re.search(r"8\.00 +\[red\]two", said)
    assert re.search(r"1\.00 +\[31mred", said)
    assert "between" not in said
    assert "\x1b" not in said


@pytest.mark.parametrize("width", [30, 80, 220])
def test_a_frame_has_the_width_of_the_terminal(in_generate: Path, width: int) -> None:
    lines = shown(read_state(in_generate), width).splitlines()
    assert max(map(len, lines)) == width


def test_runs_that_do_not_go_on(run: Path, tmp_path: Path) -> None:
    missing = read_state(tmp_path / "later")
    assert (missing.status, missing.is_running) == ("not started", False)
    assert "waiting for its settings.yaml" in shown(missing)
    file = run / "processes" / "rank_0.json"
    file.write_text(json.dumps({"host": os.uname().nodename, "pid": os.getpid(), "started_s": 1.0}))  # a later process
    assert read_state(run).status == "stopped"
    assert not re.search(r"about \S+ s +left", shown(read_state(run)))
    (run / "settings.yaml").write_text("run: {steps: 30}\n")
    assert read_state(run).status == "ended"
    file.write_text(json.dumps({"host": "another", "pid": 1, "started_s": 1.0}))
    assert read_state(run).status == "runs"
    (run / "metrics.jsonl").unlink()
    assert read_state(run).status == "starts"
    with pytest.raises(UserError, match="is a file"):
        read_state(run / "settings.yaml")


def test_open_spans_are_told_from_the_end_of_a_trace() -> None:
    def event(kind: str, name: str, second: float) -> dict[str, object]:
        return {"ph": kind, "name": name, "ts": second * 1e6}

    began = [event("E", "lost", 1), event("B", "TRAIN", 2), event("B", "WAIT", 3), event("C", "engine", 4)]
    assert current_phase(5, began) == RankPhase(5, "TRAIN > WAIT", 3.0)
    assert current_phase(5, [*began, event("E", "WAIT", 6)]) == RankPhase(5, "TRAIN", 2.0)
    assert current_phase(5, [*began, event("E", "WAIT", 6), event("E", "TRAIN", 7)]) == RankPhase(5, "", 7.0)
    assert current_phase(5, []) == RankPhase(5, "", 0.0)


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 8, 8, float("nan"), float("nan")], 3) == "▁█ "
    assert sparkline([3.0], 10) == "▁"
    assert sparkline([], 10) == sparkline([float("nan")], 10).strip() == ""
    assert len(sparkline(range(1000), 60)) == 60
    assert name_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_engines_that_are_silent_or_many(run: Path) -> None:
    state = read_state(run)
    loads = {number: [EngineLoad(state.time_s - 60, "works", number, 0, 0.0, 1.0)] for number in range(20)}
    loads[4] = [EngineLoad(state.time_s, "silent")]
    said = shown(replace(state, engines=loads))
    assert re.search(r" 4 .*silent", said)
    assert re.search(r" 19 +19 .*1 min 00 s ago", said)
    assert "and 8 more" in said
    assert not re.search(r" 19 +19 ", shown(replace(state, engines=loads, status="ended")))  # an old load


def read_until(terminal: int, what: str, seen: bytearray) -> None:
    deadline = time.monotonic() + LIMIT_S
    while what.encode() not in seen and what not in ANSI.sub("", seen.decode(errors="replace")):
        assert time.monotonic() < deadline, seen.decode(errors="replace")
        seen += os.read(terminal, 65536)


@pytest.mark.slow
def test_a_real_terminal_that_is_resized_and_left(in_generate: Path) -> None:
    """A new width shows in the next frame; Ctrl-C leaves the former screen and no trace."""
    terminal, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, 90))
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    command = [sys.executable, "-m", "grpo_mp", "watch", str(in_generate), "--every-s", "0.1"]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    seen = bytearray()
    try:
        read_until(terminal, "╭─ curves " + "─" * 79 + "╮", seen)
        termios.tcsetwinsize(terminal, (50, 60))
        read_until(terminal, "╭─ curves " + "─" * 49 + "╮", seen)
        with (in_generate / "metrics.jsonl").open("a") as lines:
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
