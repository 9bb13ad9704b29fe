"""What a real engine says of itself while it generates; and a poll of one that is slow, lost, or something else."""

import asyncio
import json
import threading
from contextlib import aclosing
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from grpo_mp.monitor.timeline import Timeline, close_open_spans, read_trace, trace_path
from grpo_mp.rollout import engine_load
from grpo_mp.rollout.client import EngineClient, SamplingParams
from grpo_mp.rollout.engine_load import EngineLoad, EnginePoll, append_load, load_file, read_loads
from grpo_mp.rollout.server import EngineProcess
from tests.engines import wait_until


@dataclass
class Hosted:
    """As much of a HostedEngine as a poll sees."""

    address: tuple[str, dict[str, str]] | None
    index: int = 3
    is_lost: bool = False


def test_a_real_engine_that_generates(engine: EngineProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many requests as were sent run, their tokens fill the cache, and there is a speed.

    They are sent again until a question has met them.
    """
    monkeypatch.setattr("grpo_mp.rollout.engine_load.LIMIT_S", 60.0)  # a busy machine is no silent engine
    timeline = Timeline(tmp_path, 1)

    async def generate() -> None:
        async with aclosing(EngineClient(3, engine.url, engine.headers, 120.0)) as client:
            await client.generate([1, 2, 3], SamplingParams(128, ignore_eos=True), 8)

    def is_met() -> bool:
        return any(load.running == 8 and (load.cache_share or 0) > 0.01 for load in read_loads(tmp_path)[3])

    rounds = 0
    with EnginePoll(Hosted((engine.url, engine.headers)), tmp_path, timeline.counter, 0.02):  # type: ignore[arg-type]
        wait_until(lambda: read_loads(tmp_path).get(3))  # what was decoded before is known
        while not is_met():
            asyncio.run(generate())
            rounds += 1
        wait_until(lambda: [load.running for load in read_loads(tmp_path).get(3, ())][-1:] == [0])
    timeline.close()
    loads = read_loads(tmp_path)[3]
    assert {load.state for load in loads} == {"works"}
    assert max(load.running or 0 for load in loads) == 8
    decoded = (loads[-1].decoded or 0) - (loads[0].decoded or 0)
    assert 0.8 * 8 * 127 * rounds < decoded <= 8 * 128 * rounds
    assert any(load.tokens_per_s for load in loads)
    counters = [event for event in read_trace(trace_path(tmp_path, 1)) if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {
        "engine 3 requests", "engine 3 cache use, %", "engine 3 tokens/s"
    }  # fmt: skip
    assert max(event["args"].get("running", 0) for event in counters) == 8
    assert close_open_spans(counters) == counters


class Odd(BaseHTTPRequestHandler):
    """Hangs until it `may_end`, then answers something else, then as SGLang does with attention in two replicas."""

    asked = 0
    may_end = threading.Event()
    load = {  # noqa: RUF012
        "num_running_reqs": 3, "num_waiting_reqs": 1, "num_used_tokens": 40, "max_total_num_tokens": 100,
        "gen_throughput": 0.0, "decode_moments": [1, 1, 1, 1, 1, 50.0],
    }  # fmt: skip

    def do_GET(self) -> None:
        Odd.asked += 1
        if Odd.asked == 1:
            self.may_end.wait()
        body = {"odd": 1} if Odd.asked == 2 else {"loads": [self.load, self.load]}
        self.send_response(200 if self.headers["Authorization"] == "Bearer key" else 401)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None: ...


def test_an_engine_that_hangs_or_is_lost_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_mp.rollout.engine_load.LIMIT_S", 0.2)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = (f"http://127.0.0.1:{server.server_address[1]}", {"Authorization": "Bearer key"})
    hosted = Hosted(None)
    poll = EnginePoll(hosted, tmp_path, lambda *_: None, 0.01)  # type: ignore[arg-type]

    answers, ask = list[EngineLoad | None](), poll.ask

    def recording_ask(client: httpx.Client) -> EngineLoad | None:
        answers.append(ask(client))
        return answers[-1]

    monkeypatch.setattr(poll, "ask", recording_ask)

    def states() -> list[str]:
        return list(dict.fromkeys(load.state for load in read_loads(tmp_path).get(3, ())))

    with poll:
        wait_until(lambda: len(answers) > 2)
        assert states() == []
        hosted.address = address
        wait_until(lambda: states() == ["silent", "works"])
        hosted.address, hosted.is_lost = None, True
        wait_until(lambda: states() == ["silent", "works", "starts"])
        Odd.asked = 0
        hosted.address = address
        wait_until(lambda: Odd.asked)
    # Here the poll has ended, although the engine hangs.
    Odd.may_end.set()
    server.shutdown()
    works = next(load for load in read_loads(tmp_path)[3] if load.works)
    assert (works.running, works.queued, works.cache_share, works.decoded) == (6, 2, 0.4, 100.0)


def test_a_file_is_bounded_and_damaged_lines_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_load, "MOST_BYTES", 4096)
    file = load_file(tmp_path, 0)
    for count in range(1000):
        append_load(file, EngineLoad(float(count), "works"))
    with file.open("a") as lines:
        lines.write('{"time_s": 1, "odd": 2}\n{"torn')
    assert file.stat().st_size < 4096 + 300
    times = [load.time_s for load in read_loads(tmp_path)[0]]
    assert times == [1000.0 - len(times) + n for n in range(len(times))]
    assert len(times) >= 10
