"""Traces: valid while running, after a kill, after a resume; merged over ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from grpo_mp.monitor.timeline import Event, Timeline, close_open_spans, merge_traces, read_trace, trace_path


def balanced(events: list[Event]) -> bool:
    """Check that on each lane every E ends the last open B, in order of time: trace viewers require it."""
    open_names: dict[tuple[int, int], list[str]] = {}
    last: dict[tuple[int, int], float] = {}
    for event in (event for event in events if event["ph"] in "BE"):
        lane = (event["pid"], event["tid"])
        if event["ts"] < last.get(lane, 0):
            return False
        last[lane] = event["ts"]
        names = open_names.setdefault(lane, [])
        if event["ph"] == "B":
            names.append(event["name"])
        elif not names or names.pop() != event["name"]:
            return False
    return not any(open_names.values())


def test_spans_nest_on_a_named_lane(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, rank=3)
    before = time.time_ns()
    with timeline.span("GENERATE"):
        with timeline.span("MOVE"):
            pass
        with timeline.span("WAIT"):
            pass
    after = time.time_ns()
    timeline.close()
    events = json.loads(trace_path(tmp_path, 3).read_text())
    assert balanced(events)
    assert {event["pid"] for event in events} == {3}
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert lanes == {0: "policy"}
    begin = next(event for event in events if event["name"] == "MOVE" and event["ph"] == "B")
    assert before / 1000 - 1e4 <= begin["ts"] <= after / 1000 + 1e4
    assert [span.name for span in timeline.take()] == ["MOVE", "WAIT", "GENERATE"]
    assert timeline.take() == ()


def test_killed_process_leaves_a_trace_that_a_resumed_one_extends(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from grpo_mp.monitor.timeline import Timeline\n"
        "timeline = Timeline(Path(sys.argv[1]), 0)\n"
        "with timeline.span('GENERATE'):\n  pass\n"
        "with timeline.span('TRAIN'), timeline.span('backward'):\n  os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=300, check=False)
    assert process.returncode == -signal.SIGKILL
    path = trace_path(tmp_path, 0)
    # What chrome://tracing does with a file that lacks its bracket.
    events = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    assert [event["name"] for event in events if event["ph"] == "B"] == ["GENERATE", "TRAIN", "backward"]
    assert balanced(close_open_spans(events))

    with path.open("a") as file:
        file.write(',\n{"ph": "M", "name": "thread_name", "args": {"name": "torn"}')
    timeline = Timeline(tmp_path, rank=0)
    with timeline.span("SYNC"):
        pass
    timeline.close()
    resumed = json.loads(path.read_text())
    assert balanced(resumed)
    assert [event["name"] for event in resumed if event["ph"] == "B"] == ["GENERATE", "TRAIN", "backward", "SYNC"]
    assert "torn" not in path.read_text()


def test_merge_holds_every_rank_and_closes_open_spans(tmp_path: Path) -> None:
    timelines = [Timeline(tmp_path, rank) for rank in range(3)]
    with timelines[0].span("TRAIN"), timelines[1].span("TRAIN"), timelines[2].span("TRAIN"):
        events = json.loads(merge_traces(tmp_path).read_text())
    assert balanced(events)
    assert {event["pid"] for event in events if event["ph"] == "B"} == {0, 1, 2}
    assert read_trace(tmp_path / "trace.json") == events
    for timeline in timelines:
        timeline.close()
    assert sorted(os.listdir(tmp_path / "trace")) == ["rank_0.json", "rank_1.json", "rank_2.json"]
