"""Whether the processes of a run are there, as far as a machine that sees its folder can tell."""

import re
import socket
from contextlib import suppress
from pathlib import Path

from grpo_mp.checkpoint.run_state import METRICS, PROCESSES
from grpo_mp.monitor.rank_dump import RankProcess, read_process
from grpo_mp.monitor.rank_processes import find_process
from grpo_mp.rollout.engine_load import FOLDER as ENGINES
from grpo_mp.utils.errors import UserError

RANK_FILE = re.compile(r"rank_(\d+)\.json")
WRITTEN = (METRICS, "trace/*", f"{ENGINES}/*", "logs/*")  # while a run goes on


def has_processes(folder: Path) -> bool:
    """Return whether a rank of the run is there: on other hosts, as far as its file says."""
    here = socket.gethostname()
    return any(
        process.host != here or find_process(process.pid, process.started_s) is not None
        for process in _processes(folder)
    )


def is_silent(folder: Path, now_s: float, limit_s: float) -> bool:
    """Return whether all ranks are on other hosts, and nothing was written for longer than `limit_s`."""
    if any(process.host == socket.gethostname() for process in _processes(folder)):
        return False
    times = []
    for file in (file for pattern in WRITTEN for file in folder.glob(pattern)):
        with suppress(FileNotFoundError):  # removed meanwhile
            times.append(file.stat().st_mtime)
    return bool(times) and now_s - max(times) > limit_s


def _processes(folder: Path) -> list[RankProcess]:
    found = []
    for file in (folder / PROCESSES).glob("rank_*.json"):
        match = RANK_FILE.fullmatch(file.name)
        try:
            process = read_process(folder, int(match[1])) if match else None
        except UserError:
            continue  # something else wrote it
        found += [process] if process else []
    return found
