"""Write the report and the timeline of a run when it ends."""

import os
import subprocess
import sys
from pathlib import Path

LIMIT_S = 60.0
EARLY_LIMIT_S = 20.0  # after a failure: torchrun kills the other ranks 30 s after the first one fails
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # the devices belong to the run


def write_report(run_folder: Path, limit_s: float = LIMIT_S) -> str | None:
    """Run `grpo-mp report --trace` in a process of its own; return a warning if it fails, or is not done in time.

    The process then continues, also after the run has ended.
    """
    # A process of its own: Matplotlib's memory, time and errors must not become those of the trainer.
    command = [sys.executable, "-m", "grpo_mp", "report", str(run_folder), "--trace"]
    log = run_folder / "logs" / "report.log"
    try:
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=os.environ | HIDDEN
            )
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"report: still being written, see {log}"
    except OSError as error:
        return f"report: not started: {error.strerror}"
    return f"report: exit status {status}, see {log}" if status else None
