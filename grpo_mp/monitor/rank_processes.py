"""Request the stacks of a run's ranks and engines by a signal, for `grpo-mp doctor stuck`."""

import os
import re
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from grpo_mp.monitor.rank_dump import RankDump, RankProcess, read_dump, read_process
from grpo_mp.monitor.stuck import EngineStacks
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import ENGINE_SCRATCH
from grpo_mp.utils.processes import DUMP_SIGNAL, catches_dump_signal, stacks_file

POLL_S = 0.05
RECENT_S = 120.0  # maximum age of a dump from another node, on which the command ran before
CREATION_SLACK_S = 2.0  # a process created later than this after the file's start time is another one with the same pid
INNERMOST = 6  # frames of an engine's stack


@dataclass(frozen=True)
class AskedEngine:
    """An engine process that was signalled to append its stacks to `file`."""

    rank: int  # host of the engine
    title: str
    file: Path
    bytes_before: int  # size of the file before the signal

    @property
    def text(self) -> str:
        """Return the text written since the signal; "" after the process has ended."""
        try:
            return self.file.read_bytes()[self.bytes_before :].decode(errors="replace")
        except OSError:
            return ""

    @property
    def has_answered(self) -> bool:
        """Return whether the process has written its stacks, or ended."""
        return "most recent call first" in self.text or not self.file.exists()

    def stacks(self) -> EngineStacks:
        """Return the innermost frames of the main thread, the thread that handled the signal."""
        text = self.text
        thread = text.rpartition("Current thread")[2].partition("\n\n")[0]
        frames = re.findall(r'File "(.*)", line (\d+) in (.*)', thread)
        innermost = tuple(f"{name}:{line} {call}" for name, line, call in frames[:INNERMOST])
        return EngineStacks(self.rank, self.title, innermost, text.strip())


def ask_ranks(run_folder: Path, limit_s: float) -> tuple[dict[int, RankDump], dict[int, str], list[EngineStacks]]:
    """Request a dump from each rank on this host; wait at most `limit_s` seconds.

    Returns dumps by rank, the reason for each rank without a dump, and the stacks of the engines. For a rank on
    another host, an existing dump that is at most RECENT_S seconds old counts.
    """
    ranks = started_ranks(run_folder)
    asked_s, deadline = time.time(), time.monotonic() + limit_s
    waiting = list[int]()
    silent = dict[int, str]()
    engines = list[AskedEngine]()
    for rank, started in ranks.items():
        process, dump = find_process(started.pid, started.started_s), read_dump(run_folder, rank)
        if started.host != socket.gethostname():
            if dump is None or dump.time_s < asked_s - RECENT_S:
                silent[rank] = f"runs on {started.host}: give the same command there, then here again"
        elif process is None:
            if dump is None or not dump.at_limit or dump.pid != started.pid:
                silent[rank] = "its process has ended"
        elif ask(process):
            waiting.append(rank)
            engines += ask_engines(rank, process)
        else:
            silent[rank] = "does not listen yet, or no longer: it starts, or ends"

    def has_dump(rank: int) -> bool:
        dump = read_dump(run_folder, rank)
        return dump is not None and dump.time_s >= asked_s

    _wait_for(deadline, lambda: all(has_dump(rank) for rank in waiting))
    _wait_for(deadline, lambda: all(engine.has_answered for engine in engines))
    late = [rank for rank in waiting if not has_dump(rank)]
    silent |= dict.fromkeys(late, f"did not answer in {limit_s:g} s: a call holds Python's lock, or it is stopped")
    dumps = {rank: dump for rank in ranks if rank not in silent and (dump := read_dump(run_folder, rank))}
    return dumps, silent, [engine.stacks() for engine in engines]


def _wait_for(deadline: float, holds: Callable[[], bool]) -> None:
    while not holds() and time.monotonic() < deadline:
        time.sleep(POLL_S)


def started_ranks(run_folder: Path) -> dict[int, RankProcess]:
    """Return the processes of the running ranks, by rank."""
    files = (run_folder / "processes").glob("rank_*.json")
    numbers = sorted(int(match[1]) for file in files if (match := re.fullmatch(r"rank_(\d+)\.json", file.name)))
    # A rank may have removed its file meanwhile.
    ranks = {rank: process for rank in numbers if (process := read_process(run_folder, rank))}
    if not ranks:
        raise UserError(f"{run_folder}: no rank runs here: give the run.folder of a running run")
    return ranks


def find_process(pid: int, started_s: float) -> psutil.Process | None:
    """Return the process `pid` that wrote its file at `started_s`, or None if that process has ended."""
    try:
        process = psutil.Process(pid)
        is_same = process.create_time() < started_s + CREATION_SLACK_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if is_same else None


def ask(process: psutil.Process) -> bool:
    """Send DUMP_SIGNAL to a process if the process handles it; return whether the signal was sent."""
    try:
        handles = catches_dump_signal(Path(f"/proc/{process.pid}/status").read_text())
        if handles:
            os.kill(process.pid, DUMP_SIGNAL)
    except PermissionError as error:
        raise UserError(f"process {process.pid} belongs to another user: run this as the user of the job") from error
    except (FileNotFoundError, ProcessLookupError):
        return False
    return handles


def ask_engines(rank: int, process: psutil.Process) -> Iterable[AskedEngine]:
    """Signal the processes of the engine that a rank hosts; yield the signalled processes."""
    for watcher in process.children():
        try:
            scratch = watcher.environ().get(ENGINE_SCRATCH)
            processes = watcher.children(recursive=True) if scratch else []
        except psutil.Error:
            continue  # the process is ending
        for child in processes:
            # SGLang overwrites a process's environment with its title, so the folder comes from the watcher.
            try:
                file = stacks_file(Path(scratch or ""), child.pid)
                engine = AskedEngine(rank, " ".join(child.cmdline()[:3]).strip(), file, file.stat().st_size)
            except (OSError, psutil.Error):
                continue  # the process is ending, or does not write its stacks
            if ask(child):
                yield engine
