"""Write the report and the timeline of a run when it ends."""

import os
import subprocess
import sys
from pathlib import Path

from grpo_mp.utils.processes import with_death_signal

LIMIT_S = 60.0
EARLY_LIMIT_S = 20.0  # after a failure: torchrun kills the other ranks 30 s after the first one fails
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # the devices belong to the run


def write_report(run_folder: Path, limit_s: float = LIMIT_S) -> str | None:
    """Run `grpo-mp report --trace` in a process of its own; return a warning if it fails or takes longer."""
    # A process of its own: Matplotlib's memory, time and errors must not become those of the trainer.
    command = with_death_signal([sys.executable, "-m", "grpo_mp", "report", str(run_folder), "--trace"])
    log = run_folder / "logs" / "report.log"
    try:
        with log.open("wb") as stream:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=os.environ | HIDDEN,
                timeout=limit_s,
                check=True,
            )
    except subprocess.CalledProcessError as error:
        return f"report: exit status {error.returncode}, see {log}"
    except subprocess.TimeoutExpired:
        return f"report: not written within {limit_s:g} s: `grpo-mp report {run_folder}` writes it"
    except OSError as error:
        return f"report: not started: {error.strerror}"
    return None
