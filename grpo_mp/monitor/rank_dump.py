"""State of a rank (phases, stacks, pending collectives), written to a file when the process gets a signal."""

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch.distributed import distributed_c10d

from grpo_mp.checkpoint.run_state import PROCESSES
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import read_json, write_json
from grpo_mp.utils.processes import DUMP_SIGNAL

LAST_COLLECTIVES = 20  # collectives of each process group in a dump
# Functions of torch that return the flight recorder of gloo, and of NCCL in CUDA builds.
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PhaseTime:
    """A phase that a rank is in, and the seconds since the phase began."""

    name: str
    seconds: float

    @property
    def text(self) -> str:
        """Return a text such as 'TRAIN for 3 s'."""
        return f"{self.name} for {self.seconds:.0f} s"


@dataclass(frozen=True)
class ThreadStack:
    """Stack of a thread: frames as 'file:line function', outermost first."""

    name: str
    frames: tuple[str, ...]


@dataclass(frozen=True)
class Collective:
    """The `sequence`-th collective of a process group, from 1; sends and receives are numbered separately."""

    group: str  # key of RankDump.groups
    sequence: int
    operation: str  # name in the flight recorder: 'gloo:all_reduce', 'nccl:recv 0<-1'
    sizes: tuple[tuple[int, ...], ...]
    is_p2p: bool
    is_pending: bool
    age_s: float  # seconds since the call


@dataclass(frozen=True)
class Group:
    """A process group: its description and the global ranks of its members."""

    name: str
    ranks: tuple[int, ...]


class RankProcess(NamedTuple):
    """Host, process id and start time of a rank's process."""

    host: str
    pid: int
    started_s: float  # since the epoch


@dataclass(frozen=True)
class RankDump:
    """The state of one rank at one moment."""

    rank: int
    host: str
    pid: int
    time_s: float  # since the epoch
    phases: tuple[PhaseTime, ...]  # the outermost first
    threads: tuple[ThreadStack, ...]  # the main thread first
    groups: Mapping[str, Group]
    collectives: tuple[Collective, ...]
    records_all: bool  # the recorder dropped no call, so a group without recorded calls has made none
    at_limit: bool = False  # the watchdog wrote this dump just before it ended the rank


def process_file(run_folder: Path, rank: int) -> Path:
    """Return the path of the file that a rank keeps while it runs; the file contains a RankProcess."""
    return run_folder / PROCESSES / f"rank_{rank}.json"


def dump_file(run_folder: Path, rank: int) -> Path:
    """Return the path of a rank's last dump."""
    return run_folder / PROCESSES / f"dump_{rank}.json"


class RankDumper:
    """Writes a RankDump each time the process gets DUMP_SIGNAL. Create at most one per process, in the main thread.

    A separate thread writes the dump, because the main thread may hang in a collective.
    """

    def __init__(self, rank: int, run_folder: Path, phases: Callable[[], Iterable[PhaseTime]]) -> None:
        self.rank = rank
        self._folder = run_folder
        self._phases = phases
        self._wake, self._wakeup_fd = os.pipe()
        os.set_blocking(self._wakeup_fd, False)
        self._thread = threading.Thread(target=self._serve, name="rank dump", daemon=True)

    def __enter__(self) -> Self:
        process = RankProcess(socket.gethostname(), os.getpid(), time.time())
        write_json(process_file(self._folder, self.rank), process._asdict())
        # Python's C-level handler writes the signal number to this descriptor even while the main thread hangs.
        self._former_fd = signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
        signal.signal(DUMP_SIGNAL, _ignore)
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        signal.signal(DUMP_SIGNAL, signal.SIG_IGN)  # the default action on a late signal would end the process
        signal.set_wakeup_fd(self._former_fd)
        os.close(self._wakeup_fd)
        self._thread.join()
        os.close(self._wake)
        process_file(self._folder, self.rank).unlink(missing_ok=True)

    def write_last(self) -> None:
        self.write(at_limit=True)

    def write(self, at_limit: bool = False) -> None:
        """Write the state of the rank; log a warning if the file cannot be written."""
        try:
            write_json(dump_file(self._folder, self.rank), asdict(self._current(at_limit)))
        except OSError as error:
            logger.warning("the state of this rank cannot be written: %s", error)

    def _current(self, at_limit: bool) -> RankDump:
        now_s = time.time()
        calls, is_all = recorded_calls(now_s)
        return RankDump(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            time_s=now_s,
            phases=tuple(self._phases()),
            threads=thread_stacks(),
            groups=process_groups(),
            collectives=last_collectives(calls),
            records_all=is_all,
            at_limit=at_limit,
        )

    def _serve(self) -> None:
        while numbers := os.read(self._wake, 64):
            if DUMP_SIGNAL in numbers:
                self.write()


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


def read_process(run_folder: Path, rank: int) -> RankProcess | None:
    """Return the process of a rank, or None if the rank has ended."""
    file = process_file(run_folder, rank)
    values = read_json(file)
    if not (values or file.exists()):
        return None
    try:
        return RankProcess(str(values["host"]), int(values["pid"]), float(values["started_s"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is not what a rank writes when it starts: remove it") from error


def read_dump(run_folder: Path, rank: int) -> RankDump | None:
    """Return a rank's last dump, or None if the file is missing or damaged."""
    try:
        return TypeAdapter(RankDump).validate_python(read_json(dump_file(run_folder, rank)))
    except ValidationError:
        return None


def thread_stacks() -> tuple[ThreadStack, ...]:
    """Return the stacks of all Python threads except the calling thread, the main thread first."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
    stacks = []
    for thread in threads:
        if thread is threading.current_thread() or thread.ident not in frames:
            continue
        summary = traceback.extract_stack(frames[thread.ident])
        stacks.append(ThreadStack(thread.name, tuple(f"{f.filename}:{f.lineno} {f.name}" for f in summary)))
    return tuple(stacks)


def process_groups() -> dict[str, Group]:
    """Return the process groups of this rank by the group name that torch's flight recorder uses."""
    world = distributed_c10d._world
    groups: dict[str, Group] = {}
    for group, ranks in list(world.pg_group_ranks.items()):
        if isinstance(group, dist.ProcessGroup):  # torch stores a placeholder for groups without this rank
            name = world.pg_names[group]
            groups[name] = Group(group.group_desc or name, tuple(sorted(ranks)))
    return groups


def recorded_calls(now_s: float) -> tuple[list[Collective], bool]:
    """Return the calls in torch's flight recorder, oldest first, and whether the recorder has kept all calls."""
    calls: list[Collective] = []
    is_all = True
    for name in RECORDERS:
        if hasattr(torch._C._distributed_c10d, name):
            entries = json.loads(getattr(torch._C._distributed_c10d, name)(True, False)).get("entries", [])
            calls += [read_collective(entry, now_s) for entry in entries]
            is_all &= not entries or entries[0]["record_id"] == 0
    return calls, is_all


def last_collectives(calls: Sequence[Collective]) -> tuple[Collective, ...]:
    """Return all pending calls and the last LAST_COLLECTIVES calls of each group, in call order."""
    kept: list[Collective] = []
    left: dict[tuple[str, bool], int] = {}
    for call in reversed(calls):
        key = call.group, call.is_p2p
        left[key] = left.get(key, LAST_COLLECTIVES) - 1
        if call.is_pending or left[key] >= 0:
            kept.append(call)
    return tuple(reversed(kept))


def read_collective(entry: Mapping[str, Any], now_s: float) -> Collective:
    """Convert an entry of the flight recorder's JSON to a Collective. `now_s`: current time since the epoch."""
    is_p2p = bool(entry["is_p2p"])
    return Collective(
        group=str(entry["process_group"][0]),
        sequence=int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        operation=str(entry["profiling_name"]),
        sizes=tuple(tuple(size) for size in entry["input_sizes"]),
        is_p2p=is_p2p,
        is_pending=not entry["retired"] and entry["state"] != "completed",
        age_s=now_s - entry["time_created_ns"] / 1e9,
    )
