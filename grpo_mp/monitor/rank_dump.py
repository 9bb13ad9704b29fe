"""State of a rank (phases, stack, pending collectives), written to a file when the process gets a signal."""

import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

import psutil
import torch
from pydantic import TypeAdapter, ValidationError
from torch.distributed import distributed_c10d

from grpo_mp.checkpoint.run_state import PROCESSES
from grpo_mp.utils.files import read_json, write_json
from grpo_mp.utils.processes import DUMP_SIGNAL

# Functions of torch that return the flight recorder of gloo, and of NCCL in CUDA builds.
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
# Name of a send or receive in the flight recorder: group rank of the caller, then of its peer.
P2P = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Collective:
    """The `sequence`-th collective of a process group, from 1; sends and receives are numbered separately."""

    group: str  # torch's name of the group, equal on all ranks
    title: str  # description of the group
    ranks: tuple[int, ...]  # global ranks of the group; of a send or receive: of both ends
    sequence: int
    operation: str  # such as "all_reduce" or "recv"
    is_p2p: bool
    is_pending: bool
    age_s: float  # seconds since the call


@dataclass(frozen=True)
class RankProcess:
    """Host, process id and creation time of a rank's process."""

    host: str
    pid: int
    created_s: float  # since the epoch


@dataclass(frozen=True)
class RankDump:
    """The state of one rank at one moment."""

    rank: int
    host: str
    pid: int
    time_s: float  # since the epoch
    phases: str  # with their durations, the outermost first
    stack: tuple[str, ...]  # main thread's frames as 'file:line function', the innermost last
    calls: tuple[Collective, ...]  # pending calls and the last call of each group, oldest first
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

    def __init__(self, rank: int, run_folder: Path, phases: Callable[[], str]) -> None:
        self.rank = rank
        self._folder = run_folder
        self._phases = phases
        self._wake, self._wakeup_fd = os.pipe()
        os.set_blocking(self._wakeup_fd, False)
        self._thread = threading.Thread(target=self._serve, name="rank dump", daemon=True)

    def __enter__(self) -> Self:
        process = RankProcess(socket.gethostname(), os.getpid(), psutil.Process().create_time())
        write_json(process_file(self._folder, self.rank), asdict(process))
        # Python's C-level handler writes the signal number to this descriptor even while the main thread hangs.
        self._former_fd = signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
        signal.signal(DUMP_SIGNAL, _ignore)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
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
        now_s = time.time()
        frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
        dump = RankDump(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            time_s=now_s,
            phases=self._phases(),
            stack=tuple(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames),
            calls=last_calls(now_s),
            at_limit=at_limit,
        )
        try:
            write_json(dump_file(self._folder, self.rank), asdict(dump))
        except OSError as error:
            logger.warning("the state of this rank cannot be written: %s", error)

    def _serve(self) -> None:
        while numbers := os.read(self._wake, 64):
            if DUMP_SIGNAL in numbers:
                self.write()


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


def read_dump(run_folder: Path, rank: int) -> RankDump | None:
    """Return a rank's last dump, or None if the file is missing or damaged."""
    try:
        return TypeAdapter(RankDump).validate_python(read_json(dump_file(run_folder, rank)))
    except ValidationError:
        return None


def last_calls(now_s: float) -> tuple[Collective, ...]:
    """Return this rank's pending calls and the last call of each group, from torch's flight recorder."""
    world = distributed_c10d._world
    groups = {str(name): tuple(sorted(world.pg_group_ranks[group])) for group, name in list(world.pg_names.items())}
    calls = []
    for name in RECORDERS:
        if dump := getattr(torch._C._distributed_c10d, name, None):
            entries = json.loads(dump(True, False)).get("entries", [])
            calls += [call for entry in entries if (call := read_call(entry, groups, now_s))]
    last = {(call.group, call.is_p2p): call for call in calls}
    return tuple(call for call in calls if call.is_pending or call is last[call.group, call.is_p2p])


def read_call(entry: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]], now_s: float) -> Collective | None:
    """Convert an entry of the flight recorder's JSON; None for the entry of a whole batch of sends and receives.

    `groups`: global ranks of each group by torch's name. `now_s`: current time since the epoch.
    """
    group, title = entry["process_group"]
    operation = str(entry["profiling_name"]).rpartition(":")[2]
    is_p2p = bool(entry["is_p2p"])
    ranks = groups.get(group, ())
    if is_p2p:
        match = P2P.fullmatch(operation)
        if not match or not ranks:
            return None
        operation = match[1]
        ranks = (ranks[int(match[2])], ranks[int(match[3])])
    return Collective(
        group=group,
        title=title,
        ranks=ranks,
        sequence=int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        operation=operation,
        is_p2p=is_p2p,
        is_pending=not entry["retired"] and entry["state"] != "completed",
        age_s=now_s - entry["time_created_ns"] / 1e9,
    )
