"""Which rank reports an error, and with which status a rank exits."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from grpo_mp.monitor.watchdog import Watchdog
from grpo_mp.trainer import exit
from grpo_mp.trainer.exit import PeerFailedError, exit_on_error, ignore_more_interrupts, report_error_once
from grpo_mp.utils.errors import DiskError, EarlyStopError, UserError

# What torch reports of a peer that is gone: gloo twice, NCCL, and the store of a launcher that was killed, twice.
PEER_GONE = (
    "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:32647.",
    "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1447: Connection reset by peer.",
    "NCCL error: remote process exited or there was a network error",
    "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    "sendBytes failed on SocketImpl(fd=3): Broken pipe",
)


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def test_only_the_first_error_of_a_job_is_reported(store: dist.Store) -> None:
    with pytest.raises(UserError, match="engine 1 ended"), report_error_once(1, store):
        raise UserError("engine 1 ended")
    with (
        pytest.raises(PeerFailedError, match=r"^rank 0: another rank failed; see its error$"),
        report_error_once(0, store),
    ):
        raise UserError("engine 0 ended")


@pytest.mark.parametrize("message", PEER_GONE)
def test_a_rank_that_lost_its_peers_names_only_its_phase(store: dist.Store, tmp_path: Path, message: str) -> None:
    with Watchdog(1, tmp_path) as watchdog:
        with pytest.raises(PeerFailedError) as raised, report_error_once(1, store), watchdog.phase("TRAIN", 60.0):
            raise RuntimeError(message)
        assert str(raised.value) == "rank 1 in TRAIN: another rank failed; see its error"
    with pytest.raises(UserError), report_error_once(0, store):  # no rank has reported yet
        raise UserError("the cause")


def test_a_full_disk_is_a_sentence(store: dist.Store, tmp_path: Path) -> None:
    with (
        Watchdog(1, tmp_path) as watchdog,
        pytest.raises(DiskError, match=r"^rank 1 in SAVE: No space left on device: make room"),
        report_error_once(1, store),
        watchdog.phase("SAVE", 60.0),
        open("/dev/full", "w") as file,
    ):
        file.write("metrics")
    with pytest.raises(FileNotFoundError), report_error_once(1, store):
        open(tmp_path / "missing").close()


def test_other_ranks_wait_for_rank_0_to_report_what_every_rank_finds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sleeps: list[float] = []
    monkeypatch.setenv("RANK", "11")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(exit.time, "sleep", lambda seconds: sleeps.append(seconds))
    with pytest.raises(SystemExit) as raised, exit_on_error():
        raise UserError("no such file on this node")
    assert sleeps == [exit.FIRST_RANK_LIMIT_S + 3]
    assert (raised.value.code, capsys.readouterr().err) == (2, "error: no such file on this node\n")


def test_a_lost_peer_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised, exit_on_error():
        raise PeerFailedError("rank 1: another rank failed; see its error")
    assert (raised.value.code, capsys.readouterr().err) == (1, "rank 1: another rank failed; see its error\n")


def interrupt(amid_cleanup: bool) -> None:
    try:
        raise KeyboardInterrupt
    finally:
        if amid_cleanup:
            raise RuntimeError("trying to pop from empty mode stack")


@pytest.mark.parametrize("amid_cleanup", [False, True])
@pytest.mark.parametrize(("rank", "message"), [("0", "rank 0 in SYNC: stopped by Ctrl-C\n"), ("1", "")])
def test_ctrl_c_is_reported_once(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    rank: str,
    message: str,
    amid_cleanup: bool,
) -> None:
    """Torch's modes fail where it comes while they are changed, and Megatron raises that again."""
    monkeypatch.setenv("RANK", rank)
    with (
        Watchdog(int(rank), tmp_path) as watchdog,
        pytest.raises(SystemExit) as raised,
        exit_on_error(),
        watchdog.phase("SYNC", 60.0),
    ):
        interrupt(amid_cleanup)
    assert (raised.value.code, capsys.readouterr().err) == (130, message)


def test_a_second_ctrl_c_is_ignored() -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins without it
    try:
        ignore_more_interrupts(ValueError)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ignore_more_interrupts(KeyboardInterrupt)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, handler)


def test_a_rank_that_exits_keeps_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher answers the end of one rank with SIGTERM to the others."""
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit), exit_on_error():
        raise UserError("no such file")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


@pytest.mark.parametrize(
    ("error", "message", "mark"),
    [
        (UserError("x"), "error: x", {}),
        (ValueError("y"), "ValueError: y", {}),
        (EarlyStopError("z"), "error: z", {"may_restart": False}),
    ],
)
def test_torchrun_shows_the_message_as_the_root_cause_and_batch_scripts_know_what_stopped_on_purpose(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, message: str, mark: dict[str, Any]
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises((SystemExit, ValueError)), exit_on_error():
        raise error
    reported = ProcessFailure(local_rank=1, pid=1, exitcode=2, error_file=str(file))
    unreported = ProcessFailure(local_rank=0, pid=2, exitcode=1, error_file="")
    summary = ChildFailedError("train", {0: unreported, 1: reported}).format_msg()
    assert f"traceback : {message}\n" in summary.partition("Root Cause")[2]
    values = json.loads(file.read_text())
    assert values.pop("message")["message"] == message
    assert values == {"rank": 0, **mark}


def test_a_thread_that_waits_for_a_peer_does_not_abort_the_rank_that_failed() -> None:
    """Rank 0's status is that of its error, not of C++'s abort()."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "tests.trainer.end_amid_receive"]
    process = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600)
    assert process.stderr.count("error: the mistake\n") == 2  # the rank's and torchrun's own
    assert "terminate called" not in process.stderr
    assert "SIGABRT" not in process.stderr
