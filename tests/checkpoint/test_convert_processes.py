"""Two processes, and processes that are killed, write the same bytes as one undisturbed process."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.serialization import get_crc32_options, set_crc32_options

from grpo_mp.checkpoint.convert import to_hf, to_megatron
from tests.bench.convert_kills import PART_BYTES, TOOL, contents, make_model, run_killed
from tests.checkpoint.helpers import no_progress

pytestmark = pytest.mark.slow
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
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
