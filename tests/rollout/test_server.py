"""Real servers are started, found dead and ended."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from grpo_mp.models.tokenizer import load_tokenizer
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.engine_main import ARGUMENTS
from grpo_mp.rollout.server import EngineProcess
from grpo_mp.utils.errors import EngineError, PhaseTimeout, UserError
from tests.engines import started_engine

START_TIMEOUT_S = 300.0
GONE_LIMIT_S = 120.0
START = """
import sys, time
from pathlib import Path
from grpo_mp.models.tokenizer import load_tokenizer
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.engine_main import ARGUMENTS
from grpo_mp.rollout.server import EngineProcess
spec = EngineSpec(index=0, rank=0, model=Path(sys.argv[1]), dtype="float32", context_tokens=160, cpu=True)
engine = EngineProcess(spec, Path(sys.argv[2]))
engine.start()
print(engine._process.pid, flush=True)
if sys.argv[3] == "ready":
    engine.wait_ready(300)
print("started", flush=True)
time.sleep(600)
"""
SpecFactory = Callable[..., EngineSpec]


def session_processes(session_id: int) -> list[psutil.Process]:
    """List the living processes of a session."""
    processes = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session_id and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return processes


def wait_until_gone(session_id: int) -> None:
    deadline = time.monotonic() + GONE_LIMIT_S
    while session_processes(session_id):
        assert time.monotonic() < deadline, f"still there: {session_processes(session_id)}"
        time.sleep(0.05)


def wait_until_server_runs(session_id: int) -> None:
    """Wait for the process beside the watcher."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while len(session_processes(session_id)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_running_engine_idles_without_work(engine: EngineProcess) -> None:
    engine.check_alive()
    processes = session_processes(engine._process.pid)
    assert len(processes) >= 4  # watcher, server, scheduler, detokenizer

    # One that polls runs, or waits for a processor, at every look.
    deadline = time.monotonic() + GONE_LIMIT_S
    asleep = 0
    while asleep < 5:
        assert time.monotonic() < deadline, [(process.cmdline(), process.status()) for process in processes]
        time.sleep(0.01)
        asleep = asleep + 1 if all(process.status() == psutil.STATUS_SLEEPING for process in processes) else 0


def test_log_is_readable_by_its_owner_only(engine: EngineProcess) -> None:
    assert engine.log.stat().st_mode & 0o077 == 0
    assert engine.api_key in engine.log.read_text()


@pytest.mark.parametrize("stage", ["starting", pytest.param("ready", marks=pytest.mark.slow)])
def test_nothing_outlives_a_killed_trainer(model_folder: Path, tmp_path: Path, stage: str) -> None:
    scratch = Path(tempfile.mkdtemp())  # its sockets have no room for the name of tmp_path
    command = [sys.executable, "-c", START, str(model_folder), str(tmp_path / "engine.log"), stage]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(scratch)})
    assert trainer.stdout is not None
    session_id = int(trainer.stdout.readline())
    assert trainer.stdout.readline() == "started\n"
    wait_until_server_runs(session_id)
    trainer.kill()
    trainer.wait()
    wait_until_gone(session_id)
    assert not list(scratch.iterdir())


def test_nothing_outlives_a_killed_watcher(make_spec: SpecFactory, tmp_path: Path) -> None:
    with started_engine(make_spec(), tmp_path / "engine.log") as engine:
        wait_until_server_runs(engine._process.pid)
        os.kill(engine._process.pid, signal.SIGKILL)
        wait_until_gone(engine._process.pid)
        with pytest.raises(UserError, match=r"engine 3 \(rank 1, .*\) ended in GENERATE"):
            engine.check_alive("in GENERATE")


@pytest.mark.slow
def test_a_server_that_cannot_come_up_shows_why(make_spec: SpecFactory, tmp_path: Path) -> None:
    model_folder = tmp_path / "model"
    model_folder.mkdir()
    (model_folder / "config.json").write_text('{"model_type": "no_such"}')
    log = tmp_path / "logs" / "engine_3.log"
    with started_engine(make_spec(model=model_folder), log) as engine:
        with pytest.raises(UserError, match=r"(?s)engine 3 \(rank 1, .*\) ended while starting.*engine_3.log.*no_such"):
            engine.wait_ready(START_TIMEOUT_S)
        wait_until_gone(engine._process.pid)


@pytest.mark.slow
def test_a_server_whose_scheduler_is_killed_while_starting_ends(make_spec: SpecFactory, tmp_path: Path) -> None:
    """As by the kernel, or a fault in a kernel: SGLang's other processes still run then."""
    with started_engine(make_spec(), tmp_path / "engine.log") as engine:
        wait_until_server_runs(engine._process.pid)
        deadline = time.monotonic() + START_TIMEOUT_S
        schedulers = list[psutil.Process]()
        while not schedulers:
            assert time.monotonic() < deadline
            processes = session_processes(engine._process.pid)
            with suppress(psutil.NoSuchProcess):  # SGLang's short processes end meanwhile
                schedulers = [process for process in processes if process.name().startswith("sglang::sched")]
        schedulers[0].kill()
        with pytest.raises(EngineError, match=r"(?s)ended while starting.*scheduler died"):
            engine.wait_ready(GONE_LIMIT_S)


def test_a_server_that_is_late_is_a_timeout_and_stop_ends_it(make_spec: SpecFactory, tmp_path: Path) -> None:
    engine = EngineProcess(make_spec(), tmp_path / "engine.log")
    engine.start()
    with pytest.raises(PhaseTimeout, match=r"engine 3 \(rank 1, .*\) did not come up within 0.5 s"):
        engine.wait_ready(0.5)
    engine.stop()
    assert not session_processes(engine._process.pid)
    engine.stop()


def test_an_engine_reads_stop_strings_by_the_tokenizer_of_the_run(
    make_spec: SpecFactory, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the folder's, which SGLang would read by rules of its own."""
    given: dict[str, Any] = {}
    monkeypatch.setattr("grpo_mp.rollout.server.subprocess.Popen", lambda *_, env, **__: given.update(env))
    tokenizer = load_tokenizer(model_folder)
    for save, reads_text in ((tokenizer.save_pretrained, True), (None, False)):
        engine = EngineProcess(make_spec(save_tokenizer=save), tmp_path / "engine.log")
        engine.start()
        arguments = json.loads(given[ARGUMENTS])
        assert arguments["skip_tokenizer_init"] is not reads_text
        if reads_text:
            read = load_tokenizer(Path(arguments["tokenizer_path"]))
            assert read("Tom has 3  apples.")["input_ids"] == tokenizer("Tom has 3  apples.")["input_ids"]
        assert ("tokenizer_path" in arguments) is reads_text
        engine.stop()


@pytest.mark.slow
def test_replicas_of_attention_answer_control_requests(make_spec: SpecFactory, tmp_path: Path) -> None:
    """Replicas meet at ports of the claim. They do not sleep: each request would wait for them, up to a second."""
    spec = make_spec(gpus=2, args={"attn_dp_size": 2, "max_running_requests": 4})
    with started_engine(spec, tmp_path / "engine.log") as engine:
        engine.wait_ready(START_TIMEOUT_S)
        with httpx.Client(base_url=engine.url, headers=engine.headers, trust_env=False, timeout=60) as client:
            assert client.post("/flush_cache").is_success
            assert client.get("/server_info").json()["sleep_on_idle"] is False
