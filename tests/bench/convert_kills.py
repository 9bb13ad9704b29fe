"""Conversions killed at random moments end with the bytes of an undisturbed one: `python -m tests.bench.convert_kills`.

A small DeepSeek-V3 folder is converted to torch_dist and back in parts of 100 kB. Each direction is killed (SIGKILL)
ten times, at moments drawn from the time between the first sign of the result and the end, and started again; what
is under the final name after the last start is compared with an undisturbed run, file by file. Exit status 1 where
a byte differs, or where the result had its name before it was whole.
"""

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.tiny.models import make_tiny, make_tokenizer

ROOT = Path(__file__).parents[2]
TOOL = ["-m", "grpo_mp", "convert"]
PART_BYTES = 100_000
LIMIT_S = 120.0


def main() -> None:
    """Convert there and back, undisturbed and killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    same = True
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = make_model(folder / "model")
        for way in ("to-megatron", "to-hf"):
            convert(way, source, folder / "undisturbed" / way)
            kills = run_killed(way, source, folder / "killed" / way, given.kills, given.seed)
            actual, expected = (contents(folder / which / way) for which in ("killed", "undisturbed"))
            differing = sorted(
                name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name)
            )
            print(
                f"{way}: killed {kills} times, {f'differing bytes in {differing}' if differing else 'the same bytes'}",
                flush=True,
            )
            same &= not differing
            source = folder / "undisturbed" / way
    raise SystemExit(0 if same else 1)


def make_model(folder: Path) -> Path:
    make_tiny(folder, "deepseek_v3", make_tokenizer(["apples"]), num_hidden_layers=12)
    return folder


def convert(way: str, source: Path, destination: Path) -> None:
    """Undisturbed."""
    process = _start(way, source, destination)
    if process.wait(LIMIT_S):
        raise subprocess.CalledProcessError(process.returncode, way)


def run_killed(way: str, source: Path, destination: Path, kills: int, seed: int) -> int:
    """Kill `kills` starts, then let one end; returns how many starts were killed."""
    draw, killed = random.Random(seed), 0
    building = destination.with_name(destination.name + ".incomplete")
    for kill in range(kills):
        process = _start(way, source, destination)
        begun = _wait_for_change(building, process)
        # Late kills find the end, early ones the beginning: parts are written within a second.
        time.sleep(draw.uniform(0.0, 0.02 if kill % 2 else 0.2))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            killed += 1
        process.wait(LIMIT_S)
        assert begun or destination.exists(), f"{way} wrote nothing"
    convert(way, source, destination)
    return killed


def contents(folder: Path) -> dict[str, str]:
    """Checksum by name of file, subfolders included."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _start(way: str, source: Path, destination: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, *TOOL, way, str(source), str(destination), "--part-bytes", str(PART_BYTES)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def _wait_for_change(folder: Path, process: "subprocess.Popen[bytes]") -> bool:
    """Return True as soon as this start touches the folder; False where it ended without."""
    before = _touched(folder)
    while process.poll() is None:
        if _touched(folder) != before:
            return True
        time.sleep(0.001)
    return False


def _touched(folder: Path) -> int:
    record = folder / "conversion.json"  # written by every start
    return record.stat().st_mtime_ns if record.exists() else 0


if __name__ == "__main__":
    main()
