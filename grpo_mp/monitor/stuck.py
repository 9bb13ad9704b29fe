"""Find the rank that blocks a hanging job: ask ranks and engines for their stacks, and compare pending collectives."""

import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from grpo_mp.checkpoint.run_state import PROCESSES
from grpo_mp.monitor.rank_dump import Collective, RankDump, RankProcess, read_dump
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import ENGINE_SCRATCH, read_json
from grpo_mp.utils.findings import Finding, Level
from grpo_mp.utils.processes import DUMP_SIGNAL, catches_dump_signal, stacks_file

FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')  # in the output of Python's faulthandler
PACKAGE = re.compile(r".*/(grpo_mp/.*)")
OVER_S = 5.0  # shorter waits in a collective are usual
RECENT_S = 120.0  # maximum age of a dump from another node, on which the command ran before
MOST_NAMED = 8  # maximum number of ranks in a sentence
STACK_LINES = 6
DEADLOCK = (
    "in different collectives, or different calls of one group: a deadlock, report it with these lines; in one "
    "collective: look at the network and the GPUs of these nodes (grpo-mp doctor machine)"
)


@dataclass(frozen=True)
class Wait:
    """A rank that waits in a collective, and the ranks that have not made the call yet."""

    rank: int
    call: Collective
    absent: tuple[int, ...]

    @property
    def line(self) -> str:
        call = f"{self.call.operation} #{self.call.sequence} of group {self.call.title}"
        missing = f", without rank {name_ranks(self.absent)}" if self.absent else ""
        members = name_ranks(self.call.ranks)
        return f"rank {self.rank} waits since {self.call.age_s:.0f} s in {call} (ranks {members}){missing}"


def ask_ranks(run_folder: Path, limit_s: float) -> tuple[dict[int, RankDump], dict[int, str], list[str]]:
    """Request the state of each rank on this host, and the stacks of its engine; wait at most `limit_s` seconds.

    Returns dumps by rank, the reason for each rank without a dump, and a line for each process of an engine. For a rank
    on another host, an existing dump that is at most RECENT_S seconds old counts.
    """
    found = (run_folder / PROCESSES).glob("rank_*.json")
    files = {int(file.stem.removeprefix("rank_")): file for file in found}
    if not files:
        raise UserError(f"{run_folder}: no rank runs here: give the run.folder of a running run")
    asked_s = time.time()
    least_s = dict[int, float]()  # a rank's dump is newer than this time
    silent = dict[int, str]()
    engines = dict[str, Path]()
    for rank, file in sorted(files.items()):
        if not (values := read_json(file)):
            continue  # the rank has ended meanwhile
        started = RankProcess(**values)
        process = find_process(started)
        dump = read_dump(run_folder, rank)
        if started.host != socket.gethostname():
            least_s[rank] = asked_s - RECENT_S
            silent[rank] = f"runs on {started.host}: give the same command there, then here again"
        elif process and ask(process):
            least_s[rank] = asked_s
            silent[rank] = f"did not answer in {limit_s:g} s: a call holds Python's lock, or it is stopped"
            engines |= ask_engines(rank, process)
        elif dump and dump.at_limit and dump.pid == started.pid:
            least_s[rank] = 0.0
        else:
            silent[rank] = "its process has ended, or does not listen yet"
    dumps = dict[int, RankDump]()
    while True:
        read = {rank: dump for rank in least_s.keys() - dumps if (dump := read_dump(run_folder, rank))}
        dumps |= {rank: dump for rank, dump in read.items() if dump.time_s >= least_s[rank]}
        stacks = {title: innermost_frames(file) for title, file in engines.items()}
        is_complete = all(stacks.values()) and all(rank in dumps for rank in least_s if least_s[rank] >= asked_s)
        if is_complete or time.time() > asked_s + limit_s:
            break
        time.sleep(0.05)
    silent = {rank: reason for rank, reason in silent.items() if rank not in dumps}
    return dumps, silent, [f"{title}: {stack or 'no answer'}" for title, stack in stacks.items()]


def find_process(started: RankProcess) -> psutil.Process | None:
    """Return a rank's process, or None if it has ended; its id may have been given to another process since."""
    try:
        process = psutil.Process(started.pid)
        is_same = process.create_time() == started.created_s and process.status() != psutil.STATUS_ZOMBIE
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


def ask_engines(rank: int, process: psutil.Process) -> dict[str, Path]:
    """Signal the processes of the engine that a rank hosts; return title -> file to which each writes its stacks."""
    files: dict[str, Path] = {}
    for watcher in process.children():
        try:
            # SGLang overwrites a process's environment with its title, so the folder comes from the watcher.
            scratch = watcher.environ().get(ENGINE_SCRATCH)
            for child in watcher.children(recursive=True) if scratch else ():
                file = stacks_file(Path(scratch or ""), child.pid)
                if file.exists():
                    os.truncate(file, 0)
                    title = f"engine of rank {rank}, {' '.join(child.cmdline()[:3]).strip()}, pid {child.pid}"
                    files |= {title: file} if ask(child) else {}
        except (OSError, psutil.Error):
            continue  # the process is ending
    return files


def innermost_frames(file: Path) -> str:
    """Return the innermost calls of the main thread, which handled the signal; "" if the stacks are not written yet."""
    try:
        text = file.read_text(errors="replace")
    except FileNotFoundError:
        return "has ended"
    frames = FRAME.findall(text.rpartition("Current thread")[2].partition("\n\n")[0])
    return " < ".join(f"{name}:{line} {call}" for name, line, call in frames[:3])


def diagnose(dumps: Mapping[int, RankDump], silent: Mapping[int, str], engines: Sequence[str] = ()) -> list[Finding]:
    """Return the findings about a hanging job. `silent`: rank without a dump -> reason; `engines`: their stacks."""
    waits = find_waits(dumps)
    findings = [*_blockers(dumps, waits), *_silent(silent, waits)]
    if waits and not findings:
        sentence = f"ranks {name_ranks(dict.fromkeys(wait.rank for wait in waits))} wait for each other"
        findings = [Finding(Level.ERROR, sentence, [wait.line for wait in waits], DEADLOCK)]
    nobody = "" if findings else "no rank waits for another one: they compute, or wait for their engines; "
    return [*findings, Finding(Level.OK, f"{nobody}where the ranks are", [*_stacks(dumps), *engines])]


def find_waits(dumps: Mapping[int, RankDump]) -> list[Wait]:
    """Return the oldest pending collective, send and receive of each rank in each of its groups."""
    waits: dict[tuple[int, str, str], Wait] = {}
    for rank, dump in sorted(dumps.items()):
        for call in dump.calls:
            if call.is_pending and call.age_s >= OVER_S:
                absent = tuple(peer for peer in call.ranks if peer != rank and not _has_called(dumps.get(peer), call))
                key = rank, call.group, call.operation if call.is_p2p else ""
                waits.setdefault(key, Wait(rank, call, absent))
    return list(waits.values())


def _has_called(dump: RankDump | None, call: Collective) -> bool:
    """Return whether a rank has made a collective, or is in the other half of a send or receive."""
    calls = [other for other in dump.calls if (other.group, other.is_p2p) == (call.group, call.is_p2p)] if dump else []
    if call.is_p2p:
        return any(other.is_pending and other.ranks == call.ranks[::-1] for other in calls)
    return any(other.sequence >= call.sequence for other in calls)


def _blockers(dumps: Mapping[int, RankDump], waits: Sequence[Wait]) -> Iterator[Finding]:
    """Yield the ranks that block other ranks and do not wait themselves."""
    absent = {rank for wait in waits for rank in wait.absent} & dumps.keys()
    for rank in sorted(absent - {wait.rank for wait in waits if wait.absent}):
        others = [wait for wait in waits if rank in wait.absent]
        who = name_ranks(dict.fromkeys(wait.rank for wait in others))
        sentence = f"rank {rank} holds up rank{'s' * (len(others) > 1)} {who}: it is {_place(dumps[rank])}"
        advice = "read its stack; if it waits for an engine, read logs/engine_*.log; if it computes, wait"
        yield Finding(Level.ERROR, sentence, [wait.line for wait in others[:MOST_NAMED]], advice)


def _silent(silent: Mapping[int, str], waits: Sequence[Wait]) -> Iterator[Finding]:
    """Yield the ranks that did not answer, by reason, with the waits that these ranks may cause."""
    for reason in dict.fromkeys(silent.values()):
        ranks = [rank for rank in sorted(silent) if silent[rank] == reason]
        evidence = [wait.line for wait in waits if not {*wait.absent}.isdisjoint(ranks)]
        sentence = f"rank{'s' * (len(ranks) > 1)} {name_ranks(ranks)}: {reason}"
        yield Finding(Level.ERROR, sentence, evidence[:MOST_NAMED])


def _stacks(dumps: Mapping[int, RankDump]) -> Iterator[str]:
    """Yield the innermost calls of the ranks, innermost last; ranks in the same place share the lines."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, dump in sorted(dumps.items()):
        ranks.setdefault(dump.stack, []).append(rank)
    for stack, alike in ranks.items():
        yield f"rank{'s' * (len(alike) > 1)} {name_ranks(alike)} {_place(dumps[alike[0]])}:"
        yield from (f"  {frame}" for frame in stack[-STACK_LINES:])


def _place(dump: RankDump) -> str:
    """Return a rank's phases and the innermost grpo_mp line of its main thread."""
    own = [match[1] for frame in dump.stack if (match := PACKAGE.match(frame))]
    return f"in {dump.phases or 'no phase'}{f', at {own[-1]}' if own else ''}"


def name_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as '0, 1, 2 and 9 more'."""
    ranks = list(ranks)
    shown = ", ".join(map(str, ranks[:MOST_NAMED]))
    return f"{shown} and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else shown
