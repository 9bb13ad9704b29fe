"""An engine that is lost, starts again and joins: real processes, whose server answers but has no model."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from grpo_mp.batching.group_selection import AdmissionRule
from grpo_mp.config.sections import EngineConfig
from grpo_mp.rollout.client import SamplingParams
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.engine_layout import EnginePlacement
from grpo_mp.rollout.hosted_engine import EngineNode, HostedEngine
from grpo_mp.rollout.rollout import Rollout
from grpo_mp.rollout.server import EngineProcess
from grpo_mp.rollout.stream import GroupStream
from grpo_mp.rollout.worker import RolloutTask
from grpo_mp.trainer.offload import engine_functions
from grpo_mp.utils.background import EventLoopThread
from grpo_mp.utils.errors import EngineError, UserError
from grpo_mp.utils.types import Prompt
from grpo_mp.weight_sync.transport import EngineLink
from tests.engines import wait_until

SERVER = """
import http.server, json, os, sys
given = json.loads(os.environ["GRPO_MP_ENGINE_ARGUMENTS"])
if os.path.exists(sys.argv[1]):
    sys.exit("broken")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": given["served_model_name"]}]}).encode())
    def do_POST(self):
        full = os.path.exists(sys.argv[2]) and "flush" not in self.path
        if full:
            os.remove(sys.argv[2])
        answer = {"message": "CUDA out of memory"} if full else {"success": True}
        self.send_response(500 if full else 200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())
http.server.HTTPServer(("127.0.0.1", given["port"]), Handler).serve_forever()
"""
LIMIT_S = 120.0
GONE = EngineError("engine 0: gone")
Host = Callable[..., HostedEngine]


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A file: while it exists no server comes up."""
    return tmp_path / "broken"


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A file: where it exists the next request but those to empty the cache finds no memory, and removes it."""
    return tmp_path / "full"


@pytest.fixture
def process(
    make_spec: Callable[..., EngineSpec], tmp_path: Path, broken: Path, full: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[EnginePlacement], EngineProcess]:
    monkeypatch.setattr("grpo_mp.rollout.server.COMMAND", [sys.executable, "-c", SERVER, str(broken), str(full)])

    def make(placement: EnginePlacement) -> EngineProcess:
        spec = make_spec(index=placement.engine, nodes=placement.nodes, node_rank=placement.node_rank)
        return EngineProcess(spec, tmp_path / f"engine_{placement.node_rank}.log")

    return make


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def host(process: Callable[[EnginePlacement], EngineProcess], store: dist.Store) -> Iterator[Host]:
    """An engine, started; it has its devices for itself."""
    loop = EventLoopThread("engine")
    hosts = list[HostedEngine]()
    before = children()

    def make(nodes: int = 1, ranks: int = 1, **config: Any) -> HostedEngine:
        placement = EnginePlacement(0, 1, 0, nodes)
        settings = EngineConfig.model_validate(config | {"ranks": ranks})
        hosts.append(HostedEngine(settings, process(placement), loop, None, LIMIT_S))
        hosts[-1].start(store)
        hosts[-1].wait_ready()
        return hosts[-1]

    yield make
    for engine in hosts:
        engine.stop()
    assert children() == before
    loop.close()


def test_a_lost_engine_starts_again_at_once_and_works_when_it_joins(host: Host, tmp_path: Path) -> None:
    engine = host()
    before = engine.client
    engine.lose(GONE, before)
    assert (engine.client, engine.is_lost) == (None, True)
    engine.lose(GONE, before)  # another request says so, too
    wait_until(lambda: engine.join(wait=False))
    assert engine.client not in (None, before)
    engine.lose(GONE, before)  # a late one
    assert not engine.is_lost
    assert [log.name for log in sorted(tmp_path.glob("*.log"))] == ["engine_0.log", "engine_0_lost_1.log"]


def test_one_that_shares_its_devices_waits_for_them(host: Host) -> None:
    engine = host(ranks=0)
    before = children()
    engine.lose(GONE)
    assert not engine.join(wait=False)
    assert len(children()) == len(before) - 1
    assert engine.join(wait=True)
    engine.lose(GONE, engine.client, generates=True)
    wait_until(lambda: engine.join(wait=False))


def test_one_that_is_lost_too_often_ends_the_job(host: Host, broken: Path) -> None:
    engine = host(max_restarts=1)
    broken.touch()
    engine.lose(GONE)
    with pytest.raises(UserError, match=r"(?s)^engine 0 .* ended; .*\(started again 1 times: engine.max_restarts\)$"):
        engine.join(wait=True)


def test_a_job_that_stops_does_not_wait_for_a_start(host: Host, broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = host()
    monkeypatch.setattr("grpo_mp.rollout.server.COMMAND", [sys.executable, "-c", "import time; time.sleep(1e6)"])
    engine.lose(GONE)
    wait_until(children)
    engine.stop()
    assert not engine.join(wait=False)


@pytest.mark.parametrize("moment", ["sleep", "wake", "sync"])
def test_one_that_runs_out_of_memory_starts_again(
    host: Host, full: Path, one_rank_group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    """Its server lives and says so; the one that starts in its place has the memory."""
    others = set(children())  # engines that other tests share
    engine = host(ranks=0)
    rollout = Rollout.__new__(Rollout)
    rollout.engine = engine
    rollout._node = None
    rollout._loop = engine._loop
    move = engine_functions(rollout, one_rank_group)["engine_weights"]
    transport: Any = SimpleNamespace(export=lambda round_, staged: nullcontext([]))
    round_: Any = None

    def sync() -> None:
        with EngineLink(rollout, transport, one_rank_group, one_rank_group).loading(round_, []):
            pass

    call = {"sleep": partial(move, False), "wake": partial(move, True), "sync": sync}[moment]
    before = engine.client
    server = set(children()) - others
    full.touch()
    call()
    assert (rollout.client, rollout.is_lost, full.exists()) == (None, True, False)
    assert server
    assert not server & set(children())  # its memory is free
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert re.fullmatch(r"engine 0: /\w+: status 500: CUDA out of memory(: where .*)?: it is started again", said)
    call()  # it takes no part
    stream = GroupStream(dist.HashStore(), "step/1", AdmissionRule(1, 1, 1))
    task = RolloutTask(lambda number: Prompt(number, "", (1,)), 1, 0, 1, SamplingParams(1))
    assert rollout.begin(task, stream).result() == {}
    wait_until(lambda: engine._ready)  # while the others generate
    assert rollout.join(wait=True)
    assert rollout.client not in (None, before)
    call()
    assert not rollout.is_lost


def test_the_nodes_of_an_engine_start_and_end_together(
    host: Host,
    process: Callable[[EnginePlacement], EngineProcess],
    store: dist.Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    placement = EnginePlacement(0, 2, 1, 2)
    node_process = process(placement)
    node = EngineNode(node_process)
    engine = host(nodes=2)
    node.start(store)

    def pid() -> int:
        return node_process._process.pid if node_process._process and not node_process.describe_end() else 0

    wait_until(pid)
    first = pid()
    engine.lose(GONE)
    wait_until(lambda: pid() not in (0, first))
    wait_until(lambda: engine.join(wait=False))
    second = pid()
    psutil.Process(second).kill()
    wait_until(lambda: engine.is_lost)
    wait_until(lambda: engine.join(wait=False))
    wait_until(lambda: pid() not in (0, second))
    node.check()
    node.stop()
    assert pid() == 0
