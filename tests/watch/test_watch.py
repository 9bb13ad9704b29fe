"""What `grpo-mp watch` shows of runs that were written out, in a real terminal, and what its server tells to whom."""

import asyncio
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
from rich.console import Console

from grpo_mp.cli.main import main
from grpo_mp.monitor.appended import COMPARED_BYTES
from grpo_mp.monitor.rules import Finding as Warning
from grpo_mp.monitor.rules import MetricLine, RuleWatch, find_warnings
from grpo_mp.monitor.run_warnings import to_findings
from grpo_mp.monitor.timeline import Timeline, read_trace, trace_path
from grpo_mp.monitor.watch.screen import Frame, name_ranges, share_rows, sparkline
from grpo_mp.monitor.watch.server import LivePage, serving
from grpo_mp.monitor.watch.state import MetricFile, RankPhase, RunReader, RunState, current_phase
from grpo_mp.rollout.engine_load import EngineLoad, EngineLoadFile, load_file
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import write_atomically

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
    file = EngineLoadFile(load_file(folder, 2))
    for second in range(4):
        file.append(EngineLoad(time.time() - 4 + second, "works", 7, 3, 0.25, 100.0 * second, 1.0))
    return folder


@pytest.fixture
def in_generate(run: Path) -> Iterator[Path]:
    timeline = Timeline(run, 0)
    with timeline.span("TRAIN"):
        pass
    with timeline.span("GENERATE"):
        timeline.counter("engine 2 requests", {"running": 1})
        yield run


def shown(state: RunState, width: int = 200, height: int | None = None) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"), highlight=False)  # noqa: SIM115
    console.print(Frame(state), height=height)
    return console.export_text()


def test_a_run_that_goes_on(
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
    assert re.search(r" 2 +7 +3 +25% +300 ", said)
    (warning,) = [one for one in find_warnings(map(metrics_of, range(STEPS))) if one.rule == "truncation"]
    assert warning.sentence in said
    assert warning.action in said
    assert "samples of step 30" in said
    assert re.search(r"8\.00 +\[red\]two", said)
    assert re.search(r"1\.00 +\[31mred", said)
    assert "between" not in said
    assert "\x1b" not in said


@pytest.mark.parametrize("width", [30, 80, 220])
def test_a_frame_has_the_width_of_the_terminal(in_generate: Path, width: int) -> None:
    lines = shown(RunReader(in_generate).read(), width).splitlines()
    assert max(map(len, lines)) == width


def test_a_low_terminal_shows_some_of_all(in_generate: Path) -> None:
    """As a terminal of 80 by 24, with names and values whole."""
    state = RunReader(in_generate).read()
    many = replace(state, metrics=[line | {f"eval/set{i}/accuracy": 0.5 for i in range(40)} for line in state.metrics])
    for one in (state, many):
        said = shown(one, 80, 24)
        lines = said.splitlines()
        assert len(lines) <= 24
        assert re.search(r"reward +[▁-█]{8,} +1\.000 +0\.033 - 1\.000", said)
        for part in ("curves", "ranks", "engines", "warnings", "samples of step 30", "GENERATE", "asked"):
            assert part in said
    assert len(shown(many, 80, 60).splitlines()) == 60 > len(shown(state, 80, 60).splitlines())
    assert len(shown(many, 80).splitlines()) > 60  # on no screen all of it
    assert "samples" not in shown(many, 80, 20)


def test_rows_are_shared_by_all_parts() -> None:
    for needed in product(range(1, 5), repeat=3):
        assert share_rows(needed, None) == list(needed)
        for height in range(30):
            rows = share_rows(needed, height)
            assert sum(count + 2 for count in rows if count) <= height
            assert all(count <= most for count, most in zip(rows, needed, strict=True))
            if height >= sum(needed) + 6:
                assert rows == list(needed)
            if height >= 12:
                assert all(count >= min(2, most) for count, most in zip(rows, needed, strict=True))


def test_a_run_of_other_hosts_that_writes_nothing_any_more_is_silent(run: Path) -> None:
    (run / "processes" / "rank_0.json").write_text(json.dumps({"host": "another", "pid": 1, "started_s": 1.0}))
    (run / "settings.yaml").write_text("run: {steps: 40}\nmonitor: {phase_timeout_s: 600}\n")
    assert RunReader(run).read().status == "runs"
    for file in run.rglob("*"):
        os.utime(file, (time.time() - 700,) * 2)
    silent = RunReader(run).read()
    assert (silent.status, silent.goes_on) == ("silent", False)
    assert not re.search(r"about .* left", shown(silent))
    load_file(run, 2).touch()
    assert RunReader(run).read().status == "runs"


def test_what_no_longer_holds_comes_last_and_says_until_when(run: Path) -> None:
    early = Warning("a", 90, "a", "it was bad", "m", "do", "", "s", 3, 9, 2)
    late = Warning("b", 50, "b", "it is bad", "m", "do", "", "s", 4, 30, 7)
    assert [one.sentence for one in to_findings([early, late], 30)] == ["it is bad", "it was bad (until step 9)"]
    assert [one.sentence for one in to_findings([early, late])] == ["it was bad", "it is bad"]
    assert to_findings([early])[0].evidence[1] == "at 2 of the steps 3 to 9; the rule is from s"


def test_runs_that_do_not_go_on(run: Path, tmp_path: Path) -> None:
    missing = RunReader(tmp_path / "later").read()
    assert (missing.status, missing.goes_on) == ("not started", False)
    assert "waiting for its settings.yaml" in shown(missing)
    file = run / "processes" / "rank_0.json"
    file.write_text(json.dumps({"host": os.uname().nodename, "pid": os.getpid(), "started_s": 1.0}))  # a later process
    reader = RunReader(run)
    assert reader.read().status == "stopped"
    assert not re.search(r"about \S+ s +left", shown(reader.read()))
    (run / "settings.yaml").write_text("run: {steps: 30}\n")
    assert reader.read().status == "ended"
    file.write_text(json.dumps({"host": "another", "pid": 1, "started_s": 1.0}))
    assert reader.read().status == "runs"
    (run / "metrics.jsonl").unlink()
    assert reader.read().status == "starts"
    with pytest.raises(UserError, match="is a file"):
        RunReader(run / "settings.yaml")


def test_metrics_are_read_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricFile(path)
    assert file.read() == []
    with path.open("a") as lines:
        lines.write('{"step": 1, "a": 1}\n{"step": 2, ')
        lines.flush()
        assert file.read() == [{"step": 1, "a": 1}]
        lines.write('"a": 2}\n{"step": 3}\n')
    assert [line["step"] for line in file.read()] == [1, 2, 3]
    replaced = tmp_path / "new"
    replaced.write_text('{"step": 1, "a": 5}\nno JSON\n')
    replaced.replace(path)
    assert file.read() == [{"step": 1, "a": 5}]


def test_rules_look_at_each_line_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has begun anew is looked at anew."""
    looked, step = list[int](), RuleWatch.step

    def note(watch: RuleWatch, line: MetricLine) -> list[Warning]:
        looked.append(int(line["step"] or 0))
        return step(watch, line)

    monkeypatch.setattr(RuleWatch, "step", note)
    reader = RunReader(run)
    for end in range(31, 34):
        with (run / "metrics.jsonl").open("a") as lines:
            lines.write("\n" + json.dumps(metrics_of(end)) + "\n")
        for _ in range(2):
            state = reader.read()
            looks, found = [*looked], to_findings(find_warnings(state.metrics), end)
            looked[:] = looks
            assert state.warnings == found != []
    assert looked == [*range(1, 34)]
    (run / "metrics.jsonl").write_text(json.dumps(metrics_of(1)) + "\n")
    assert reader.read().warnings == []
    assert looked == [*range(1, 34), 1]


def test_open_spans_are_told_from_the_end_of_a_trace() -> None:
    def event(kind: str, name: str, second: float) -> dict[str, object]:
        return {"ph": kind, "name": name, "ts": second * 1e6}

    began = [event("E", "lost", 1), event("B", "TRAIN", 2), event("B", "WAIT", 3), event("C", "engine", 4)]
    assert current_phase(5, began) == RankPhase(5, "TRAIN > WAIT", 3.0, 2.0)
    assert current_phase(5, [*began, event("E", "WAIT", 6)]) == RankPhase(5, "TRAIN", 2.0, 2.0)
    assert current_phase(5, [*began, event("E", "WAIT", 6), event("E", "TRAIN", 7)]) == RankPhase(5, "", 7.0, 7.0)
    assert current_phase(5, [*began, event("M", "process_name", 8)]).name == ""
    assert current_phase(5, []) == RankPhase(5, "", 0.0, 0.0)


def test_what_ranks_and_engines_do_is_followed_by_what_is_appended(run: Path) -> None:
    """Whatever part of the trace has been written, it is as of the whole; what was read is not read again."""
    timeline, reader = Timeline(run, 0), RunReader(run)
    file = trace_path(run, 0)

    def in_phase() -> RankPhase:
        (phase,) = reader.read().ranks
        assert phase == current_phase(0, read_trace(file))
        return phase

    for name in ("GENERATE", "SCORE"):
        with timeline.span(name):
            assert in_phase().name == name
        assert in_phase().name == ""
    with timeline.span("TRAIN"):
        assert in_phase().name == "TRAIN"
        spoil(file)
        with timeline.span("WAIT"):
            assert [phase.name for phase in reader.read().ranks] == ["TRAIN > WAIT"]
    resumed = Timeline(run, 0)
    with resumed.span("SYNC"):
        assert in_phase().name == "SYNC"
    loads = load_file(run, 2)
    assert [load.running for load in reader.read().engines[2]] == [7] * 4
    spoil(loads)
    EngineLoadFile(loads).append(EngineLoad(time.time(), "works", 9))
    assert [load.running for load in reader.read().engines[2]] == [7, 7, 7, 7, 9]


def spoil(file: Path) -> None:
    """Overwrite with blanks what a file holds in lines that have their ends, but for the bytes that are compared."""
    lines = file.read_bytes().rpartition(b"\n")[0]
    with file.open("r+b") as stream:
        stream.write(b" " * max(0, len(lines) - COMPARED_BYTES))


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 8, 8, None, None], 3) == "▁█ "
    assert sparkline([3.0], 10) == "▁"
    assert sparkline([], 10) == sparkline([float("nan")], 10).strip() == ""
    assert len(sparkline(range(1000), 60)) == 60
    assert name_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_engines_that_are_silent_or_many(run: Path) -> None:
    state = RunReader(run).read()
    loads = {number: [EngineLoad(state.time_s - 60, "works", number, 0, 0.0, 1.0)] for number in range(20)}
    loads[4] = [EngineLoad(state.time_s, "silent")]
    said = shown(replace(state, engines=loads))
    assert re.search(r" 4 .*silent", said)
    assert re.search(r" 19 +19 .*1 min 00 s ago", said)
    assert "and 8 more" in said
    ended = shown(replace(state, engines=loads, status="ended"))
    assert not re.search(r" 19 +19 ", ended)  # what it did last is not what it does


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


def serve(folder: Path, make: Callable[[], str], ask: Callable[[str, LivePage], object]) -> None:
    async def run() -> None:
        live = LivePage(folder, make)
        async with serving(live) as url:
            following = asyncio.create_task(live.follow())
            await asyncio.to_thread(ask, url, live)
            following.cancel()

    asyncio.run(run())


def test_the_page_is_for_who_has_the_key(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made anew when the metrics change, and not otherwise."""
    monkeypatch.setattr("grpo_mp.monitor.watch.server.LOOK_EVERY_S", 0.02)
    made, clock_reads = 0, list[float]()

    def read_clock() -> float:
        clock_reads.append(0.0)
        return 0.0

    monkeypatch.setattr("grpo_mp.monitor.watch.server.time", SimpleNamespace(monotonic=read_clock))

    def let_it_look() -> None:
        """Wait until a look has begun and ended: it reads the clock at both, and another may be under way."""
        deadline, before = time.monotonic() + LIMIT_S, len(clock_reads)
        while len(clock_reads) < before + 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def make() -> str:
        nonlocal made
        made += 1
        return f"<p>page {made} of {run.name}</p>"

    def ask(url: str, live: LivePage) -> None:
        base, _, key = url.partition("?key=")
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", base)
        assert len(key) >= 32
        for wrong in (base, f"{base}?key=", f"{base}?key={key[:-1]}", f"{base}?key=ü"):
            reply = httpx.get(wrong, trust_env=False)
            assert reply.status_code == 401
            assert "page" not in reply.text
        reply = httpx.get(url, trust_env=False)
        assert (reply.status_code, reply.text) == (200, "<p>page 1 of run</p>")
        assert reply.headers["Referrer-Policy"] == "no-referrer"
        assert httpx.get(url, headers={"If-None-Match": reply.headers["ETag"]}, trust_env=False).status_code == 304
        let_it_look()
        assert made == 1
        with (run / "metrics.jsonl").open("a") as lines:
            lines.write("\n")
        deadline = time.monotonic() + LIMIT_S
        while "page 2" not in httpx.get(url, trust_env=False).text:
            assert time.monotonic() < deadline
        let_it_look()  # once more for the last who asked
        with (run / "metrics.jsonl").open("a") as lines:
            lines.write("\n")
        let_it_look()
        assert made == 2  # nobody asks any more

    serve(run, make, ask)


@pytest.mark.parametrize("name", ["eval/step_000000.json", "samples/step_000031.jsonl", "plan.json"])
def test_the_page_shows_what_is_written_behind_the_metrics(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As the scores of step 0, until whose end there is no other line of metrics."""
    monkeypatch.setattr("grpo_mp.monitor.watch.server.LOOK_EVERY_S", 0.02)
    (run / "eval").mkdir()

    def make() -> str:
        return f"<body>{(run / name).exists()}</body>"

    def ask(url: str, live: LivePage) -> None:
        assert httpx.get(url, trust_env=False).text == "<body>False</body>"
        write_atomically(run / name, "{}")
        deadline = time.monotonic() + LIMIT_S
        while httpx.get(url, trust_env=False).text != "<body>True</body>":
            assert time.monotonic() < deadline

    serve(run, make, ask)


@pytest.mark.parametrize("path", [b"/?key=%FF%C3", b"/?key=\xff\xfe", b"/\xff", b"/?key=" + b"a" * 20_000])
def test_a_request_that_is_none_is_refused_without_a_word(
    run: Path, path: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    def ask(url: str, live: LivePage) -> None:
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), LIMIT_S) as connection:
            connection.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: here\r\n\r\n")
            assert re.match(rb"HTTP/1\.[01] 40[01] ", connection.recv(100))

    serve(run, lambda: "", ask)
    assert not caplog.records


def test_a_run_without_a_report_yet_says_so(tmp_path: Path) -> None:
    def make() -> str:
        raise UserError("no step is <there>")

    def ask(url: str, live: LivePage) -> None:
        assert "no step is &lt;there&gt;" in httpx.get(url, trust_env=False).text

    serve(tmp_path, make, ask)


def test_a_page_that_cannot_be_made_anew_says_so(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_mp.monitor.watch.server.LOOK_EVERY_S", 0.02)
    problems = list[str]()

    def make() -> str:
        if problems:
            raise UserError(problems[0])
        return "<body>the page</body>"

    def ask(url: str, live: LivePage) -> None:
        alert = '<p id="live-problem" role="alert">This is not of the newest step: line 7 is &lt;damaged&gt;</p>'
        problems.append("line 7 is <damaged>")
        with (run / "metrics.jsonl").open("a") as lines:
            lines.write("\n")
        wait_for(url, f"<body>{alert}the page</body>")
        problems.clear()  # without a new line
        wait_for(url, "<body>the page</body>")

    def wait_for(url: str, text: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while httpx.get(url, trust_env=False).text != text:
            assert time.monotonic() < deadline

    serve(run, make, ask)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    async def twice() -> None:
        async with serving(LivePage(tmp_path, lambda: "")) as url:
            port = int(re.findall(r":(\d+)/", url)[0])
            with pytest.raises(UserError, match=rf"^--port {port}: .*: choose another"):
                async with serving(LivePage(tmp_path, lambda: ""), port):
                    pass

    asyncio.run(twice())


@pytest.mark.parametrize("port", ["65536", "-1", "http"])
def test_what_is_no_port_is_refused(tmp_path: Path, port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["watch", str(tmp_path), "--serve", f"--port={port}"])
    assert "from 0 to 65,535" in capsys.readouterr().err
