"""Two processes, and processes that are killed, write the bytes that one undisturbed process writes."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.serialization import get_crc32_options, set_crc32_options

from grpo_mp.checkpoint.to_hf import to_hf
from grpo_mp.checkpoint.to_megatron import to_megatron
from tests.bench.convert_kills import PART_BYTES, TOOL, contents, make_model, run_killed

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LIMIT_S = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `to-megatron` and `to-hf` that nothing disturbed."""
    folder = tmp_path_factory.mktemp("alone")
    with without_crc32():
        to_megatron(model, folder / "to-megatron", _unwatched, PART_BYTES)
        to_hf(folder / "to-megatron", folder / "to-hf", None, False, _unwatched, PART_BYTES)
    return folder


@contextmanager
def without_crc32() -> Iterator[None]:
    """As the tool writes."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _unwatched(done: int, total: int) -> None:
    """Progress that nobody watches."""


def torchrun(words: Sequence[object]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *TORCHRUN, *TOOL, *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def test_two_ranks_divide_the_work(model: Path, alone: Path, tmp_path: Path) -> None:
    together = tmp_path / "together"
    for way, source in (("to-megatron", model), ("to-hf", alone / "to-megatron")):
        done = torchrun(convert_words(way, source, together / way))
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("whole:") == 1
        assert contents(together / way) == contents(alone / way)
        assert [path.name for path in together.iterdir() if path.suffix] == []


def convert_words(way: str, source: Path, destination: Path) -> list[object]:
    return [way, source, destination, "--part-bytes", PART_BYTES]


def test_a_mistake_is_said_once(model: Path, tmp_path: Path) -> None:
    done = torchrun(convert_words("to-hf", model, tmp_path / "back"))
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1
    assert "no torch_dist checkpoint is there" in done.stderr


def test_killed_twice(model: Path, alone: Path, tmp_path: Path) -> None:
    assert run_killed("to-megatron", model, tmp_path / "killed", kills=2, seed=0) == 2
    assert contents(tmp_path / "killed") == contents(alone / "to-megatron")
