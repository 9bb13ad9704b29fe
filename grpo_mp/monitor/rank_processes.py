"""Ask the ranks and engines of a run for their stacks: the part of `grpo-mp doctor stuck` that sends signals."""

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
RECENT_S = 120.0  # age of a dump of another node, where the command ran before
CREATION_SLACK_S = 2.0  # a process begins shortly before it writes its file: a younger one has only the same number
INNERMOST = 6  # frames


@dataclass(frozen=True)
class AskedEngine:
    """A process of an engine that was asked for its stacks, which it appends to `file`."""

    rank: int  # that hosts it
    title: str
    file: Path
    bytes_before: int

    @property
    def text(self) -> str:
        """Return what the process has written since; "" after its end."""
        try:
            return self.file.read_bytes()[self.bytes_before :].decode(errors="replace")
        except OSError:
            return ""

    @property
    def has_answered(self) -> bool:
        """Return whether the process has written its stacks, or ended."""
        return "most recent call first" in self.text or not self.file.exists()

    def stacks(self) -> EngineStacks:
        """Return the innermost frames of the main thread, which handled the signal."""
        text = self.text
        thread = text.rpartition("Current thread")[2].partition("\n\n")[0]
        frames = re.findall(r'File "(.*)", line (\d+) in (.*)', thread)
        innermost = tuple(f"{name}:{line} {call}" for name, line, call in frames[:INNERMOST])
        return EngineStacks(self.rank, self.title, innermost, text.strip())


def ask_ranks(run_folder: Path, limit_s: float) -> tuple[dict[int, RankDump], dict[int, str], list[EngineStacks]]:
    """Ask each rank of this host for a dump; return the dumps, the ranks without one and why, and engines' stacks.

    For ranks of other hosts, a dump of at most RECENT_S counts.
    """
    ranks = started_ranks(run_folder)
    asked_s, deadline = time.time(), time.monotonic() + limit_s
    waiting, silent, engines = list[int](), dict[int, str](), list[AskedEngine]()
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
    """Return the process of each rank of a run."""
    files = (run_folder / "processes").glob("rank_*.json")
    numbers = sorted(int(match[1]) for file in files if (match := re.fullmatch(r"rank_(\d+)\.json", file.name)))
    ranks = {rank: process for rank in numbers if (process := read_process(run_folder, rank))}  # some may end meanwhile
    if not ranks:
        raise UserError(f"{run_folder}: no rank runs here: give the run.folder of a running run")
    return ranks


def find_process(pid: int, started_s: float) -> psutil.Process | None:
    """Return the process that wrote its file at `started_s`; None after its end."""
    try:
        process = psutil.Process(pid)
        is_same = process.create_time() < started_s + CREATION_SLACK_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if is_same else None


def ask(process: psutil.Process) -> bool:
    """Send the signal to a process if it has a handler; return whether it was sent."""
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
    """Ask the processes of the engine that a rank hosts."""
    for watcher in process.children():
        try:
            scratch = watcher.environ().get(ENGINE_SCRATCH)
            processes = watcher.children(recursive=True) if scratch else []
        except psutil.Error:
            continue  # it is ending
        for child in processes:
            # SGLang's title of a process overwrites its environment: the folder is known from the watcher.
            try:
                file = stacks_file(Path(scratch or ""), child.pid)
                engine = AskedEngine(rank, " ".join(child.cmdline()[:3]).strip(), file, file.stat().st_size)
            except (OSError, psutil.Error):
                continue  # it is ending, or does not write its stacks
            if ask(child):
                yield engine
