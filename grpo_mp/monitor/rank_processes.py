"""Ask the ranks and engines of a run what they do: the part of `grpo-mp doctor stuck` that sends signals."""

import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from grpo_mp.monitor.rank_dump import RankDump, RankProcess, read_dump, read_process
from grpo_mp.monitor.stuck import EngineStacks
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import ENGINE_SCRATCH
from grpo_mp.utils.processes import DUMP_SIGNAL, catches_dump_signal, stacks_file

POLL_S = 0.05
RECENT_S = 120.0  # dumps of other nodes, where the command ran before, are this fresh
CREATION_SLACK_S = 2.0  # a process begins before it writes its file; more than that and it is another one


@dataclass(frozen=True)
class AskedEngine:
    """A process of an engine that was asked for its stacks, which it appends to `file`."""

    rank: int  # that hosts it
    title: str
    file: Path
    bytes_before: int

    def text(self) -> str:
        """Return what it has written since; "" where it has ended."""
        try:
            return self.file.read_bytes()[self.bytes_before :].decode(errors="replace")
        except OSError:
            return ""

    def has_answered(self) -> bool:
        """Return whether it has written, or ended."""
        return "most recent call first" in self.text() or not self.file.exists()

    def stacks(self, most: int = 6) -> EngineStacks:
        """Return the innermost frames of the thread that had the signal, which is the main one."""
        text = self.text()
        thread = text.rpartition("Current thread")[2].partition("\n\n")[0]
        frames = re.findall(r'File "(.*)", line (\d+) in (.*)', thread)
        innermost = tuple(f"{name}:{line} {call}" for name, line, call in frames[:most])
        return EngineStacks(self.rank, self.title, innermost, text.strip())


def ask_ranks(run_folder: Path, limit_s: float) -> tuple[dict[int, RankDump], dict[int, str], list[EngineStacks]]:
    """Let each rank of this host write a dump; return the dumps, the ranks without one and why, and engines' stacks.

    Ranks of other hosts count with a dump that is at most RECENT_S old.
    """
    ranks = started_ranks(run_folder)
    asked_s = time.time()
    waiting, silent, engines = [], {}, list[AskedEngine]()
    for rank, started in ranks.items():
        if started.host != socket.gethostname():
            dump = read_dump(run_folder, rank)
            if dump is None or dump.time_s < asked_s - RECENT_S:
                silent[rank] = f"runs on {started.host}: give the same command there, then here again"
            continue
        process = find_process(started.pid, started.started_s)
        if process is None:
            dump = read_dump(run_folder, rank)
            if dump is None or not dump.at_limit or dump.pid != started.pid:
                silent[rank] = "its process has ended"
        elif ask(process):
            waiting.append(rank)
            engines += ask_engines(rank, process)
        else:
            silent[rank] = "does not listen yet, or no longer: it starts, or ends"
    deadline = time.monotonic() + limit_s
    while waiting and time.monotonic() < deadline:
        waiting = [rank for rank in waiting if not _is_fresh(read_dump(run_folder, rank), asked_s)]
        time.sleep(POLL_S)
    while not all(engine.has_answered() for engine in engines) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    silent |= dict.fromkeys(waiting, f"did not answer in {limit_s:g} s: a call holds Python's lock, or it is stopped")
    dumps = {rank: dump for rank in ranks if rank not in silent and (dump := read_dump(run_folder, rank))}
    return dumps, silent, [engine.stacks() for engine in engines]


def started_ranks(run_folder: Path) -> dict[int, RankProcess]:
    """Return what each rank of a run wrote when it started."""
    if not run_folder.is_dir():
        raise UserError(f"{run_folder} is no folder: give the run.folder of a run")
    files = (run_folder / "processes").glob("rank_*.json")
    numbers = sorted(int(match[1]) for file in files if (match := re.fullmatch(r"rank_(\d+)\.json", file.name)))
    ranks = {rank: process for rank in numbers if (process := read_process(run_folder, rank))}  # some may end meanwhile
    if not ranks:
        raise UserError(f"{run_folder}: no rank runs here: give the run.folder of a run that goes on")
    return ranks


def find_process(pid: int, started_s: float) -> psutil.Process | None:
    """Return the process that wrote its file at `started_s`; None where it has ended."""
    try:
        process = psutil.Process(pid)
        is_it = process.create_time() < started_s + CREATION_SLACK_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if is_it else None


def ask(process: psutil.Process) -> bool:
    """Send the signal to a process that handles it; return whether it does."""
    try:
        handles = catches_dump_signal(Path(f"/proc/{process.pid}/status").read_text())
        if handles:
            os.kill(process.pid, DUMP_SIGNAL)
    except PermissionError as error:
        raise UserError(f"process {process.pid} belongs to another user: run this as the user of the job") from error
    except (FileNotFoundError, ProcessLookupError):
        return False
    return handles


def ask_engines(rank: int, process: psutil.Process) -> list[AskedEngine]:
    """Ask the processes of the engine that a rank hosts."""
    asked = []
    for watcher in process.children():
        try:
            scratch = watcher.environ().get(ENGINE_SCRATCH)
            processes = watcher.children(recursive=True) if scratch else []
        except psutil.Error:
            continue  # it ends
        for child in processes:  # whose own environment SGLang writes over, when it gives them a title
            try:
                file = stacks_file(Path(scratch or ""), child.pid)
                engine = AskedEngine(rank, " ".join(child.cmdline()[:3]).strip(), file, file.stat().st_size)
            except (OSError, psutil.Error):
                continue  # it ends, or is not one that writes its stacks
            if ask(child):
                asked.append(engine)
    return asked


def _is_fresh(dump: RankDump | None, asked_s: float) -> bool:
    return dump is not None and dump.time_s >= asked_s
