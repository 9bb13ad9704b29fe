"""Two processes, and processes that are killed, write the same bytes as one undisturbed process."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.serialization import get_crc32_options, set_crc32_options

from grpo_mp.checkpoint.convert import to_hf, to_megatron
from tests.checkpoint.helpers import no_progress
from tools.tiny.models import make_tiny, make_tokenizer

pytestmark = pytest.mark.slow
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TOOL = ["-m", "grpo_mp", "convert"]
PART_BYTES = 100_000
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    with without_crc32():
        to_megatron(model, folder / "to-megatron", no_progress, PART_BYTES)
        to_hf(folder / "to-megatron", folder / "to-hf", None, False, no_progress, PART_BYTES)
    return folder


@contextmanager
def without_crc32() -> Iterator[None]:
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def torchrun(arguments: Sequence[object]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *TORCHRUN, *TOOL, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_two_ranks_divide_the_work(model: Path, undisturbed: Path, tmp_path: Path) -> None:
    together = tmp_path / "together"
    for command, source in (("to-megatron", model), ("to-hf", undisturbed / "to-megatron")):
        result = torchrun(convert_arguments(command, source, together / command))
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("written:") == 1
        assert contents(together / command) == contents(undisturbed / command)
        assert [path.name for path in together.iterdir() if path.suffix] == []


def convert_arguments(command: str, source: Path, destination: Path) -> list[object]:
    return [command, source, destination, "--part-bytes", PART_BYTES]


def test_an_error_is_reported_once(model: Path, tmp_path: Path) -> None:
    result = torchrun(convert_arguments("to-hf", model, tmp_path / "back"))
    assert result.returncode != 0
    assert result.stderr.count("error: ") == 1
    assert "is not a torch_dist checkpoint" in result.stderr


def test_killed_twice(model: Path, undisturbed: Path, tmp_path: Path) -> None:
    assert run_killed("to-megatron", model, tmp_path / "killed", kills=2, seed=0) == 2
    assert contents(tmp_path / "killed") == contents(undisturbed / "to-megatron")


def make_model(folder: Path) -> Path:
    make_tiny(folder, "deepseek_v3", make_tokenizer(["apples"]), num_hidden_layers=12)
    return folder


def convert(way: str, source: Path, destination: Path) -> None:
    """Undisturbed."""
    process = _start(way, source, destination)
    if process.wait(TIMEOUT_S):
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
        process.wait(TIMEOUT_S)
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
