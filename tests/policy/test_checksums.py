"""Weights that a disk or a copy changed are found by checksum, at every door that reads them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_mp.checkpoint.converted_reader import open_weights
from grpo_mp.checkpoint.describe import describe_hf
from grpo_mp.checkpoint.manifest import RECORD
from grpo_mp.checkpoint.run_state import TrainState, checkpoint_folder, write_manifest
from grpo_mp.checkpoint.to_hf import to_hf
from grpo_mp.checkpoint.to_megatron import to_megatron
from grpo_mp.checkpoint.torch_dist_reader import describe_torch_dist
from grpo_mp.config import check_settings
from grpo_mp.distributed.process_groups import single_process_group, start_parallel, stop_parallel
from grpo_mp.errors import UserError
from grpo_mp.examples.tiny_models import make_tiny
from grpo_mp.examples.tiny_tokenizer import make_tokenizer
from grpo_mp.policy.checkpoint import save_policy
from grpo_mp.policy.policy import Policy
from grpo_mp.trainer.context import build_policy, newest_checkpoint
from tests.least import LEAST
from tests.policy.spoiling import flip_bit

DIFFERS = "differs from its checksum: copy it again"


def ignore(done: int, total: int) -> None:
    """Progress that nobody watches."""


def build(model: Path, run: Path) -> None:
    """Start a policy as a run of one rank does."""
    run_settings = {"folder": str(run), "steps": 3}
    tree = LEAST | {"run": run_settings, "model": {"path": str(model), "dtype": "float32"}}
    settings = check_settings(tree, "test")
    with single_process_group():
        parallel = start_parallel(settings.layout, 0, 600.0)
        try:
            build_policy(settings, parallel, TrainState(), newest_checkpoint(settings))
        finally:
            stop_parallel()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checksums") / "model"
    make_tiny(folder, "deepseek_v3", make_tokenizer(["apples"]), num_hidden_layers=2, hidden_size=64)
    return folder


def largest(folder: Path, pattern: str) -> Path:
    return max(folder.rglob(pattern), key=lambda file: file.stat().st_size)


def compare(source: Path) -> None:
    with open_weights(source, verify=True) as reader:
        for name in reader.names:
            reader.read(name)


DOORS: dict[str, Callable[[Path, Path], object]] = {
    "to-hf": lambda converted, new: to_hf(converted, new / "back", None, False, ignore),
    "info": lambda converted, new: describe_torch_dist(converted),
    "check": lambda converted, new: compare(converted),
    "train": lambda converted, new: build(converted, new / "run"),
}


@pytest.mark.parametrize("door", DOORS)
def test_one_flipped_bit_of_a_converted_folder(door: str, model: Path, tmp_path: Path) -> None:
    to_megatron(model, tmp_path / "megatron", ignore)
    DOORS[door](tmp_path / "megatron", tmp_path / "before")
    file = largest(tmp_path / "megatron", "*.distcp")
    flip_bit(file, file.stat().st_size // 2)
    with pytest.raises(UserError, match=f"{file} {DIFFERS}$"):
        DOORS[door](tmp_path / "megatron", tmp_path / "after")
    assert not (tmp_path / "after" / "back").exists()


def test_one_flipped_bit_of_a_folder_that_a_conversion_wrote(model: Path, tmp_path: Path) -> None:
    to_megatron(model, tmp_path / "megatron", ignore)
    to_hf(tmp_path / "megatron", tmp_path / "back", None, False, ignore)
    assert describe_hf(tmp_path / "back").checksums == "1 files agree"
    assert describe_hf(model).checksums == "none are recorded"
    file = tmp_path / "back" / "model.safetensors"
    flip_bit(file, file.stat().st_size // 2)
    doors: list[Callable[[], object]] = [
        lambda: describe_hf(tmp_path / "back"),
        lambda: compare(tmp_path / "back"),
        lambda: to_megatron(tmp_path / "back", tmp_path / "again", ignore),
        lambda: build(tmp_path / "back", tmp_path / "run"),
    ]
    for door in doors:
        with pytest.raises(UserError, match=f"{file} {DIFFERS}$"):
            door()


@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json"])
def test_the_list_of_tensors_has_a_checksum_too(name: str, model: Path, tmp_path: Path) -> None:
    to_megatron(model, tmp_path / "megatron", ignore)
    file = tmp_path / "megatron" / name
    for byte in range(0, file.stat().st_size, max(file.stat().st_size // 20, 1)):
        flip_bit(file, byte)
        with pytest.raises(UserError, match=DIFFERS):
            describe_torch_dist(tmp_path / "megatron")
        flip_bit(file, byte)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"parts": {"part_00000": {"a": {"bytes": "many"}}}}'])
def test_a_torn_record_is_refused(text: str, model: Path, tmp_path: Path) -> None:
    to_megatron(model, tmp_path / "megatron", ignore)
    (tmp_path / "megatron" / RECORD).write_text(text)
    with pytest.raises(UserError, match=r"conversion.json is torn: copy it again"):
        describe_torch_dist(tmp_path / "megatron")


def test_a_run_does_not_go_on_from_a_changed_checkpoint(model: Path, tmp_path: Path) -> None:
    settings = check_settings(LEAST | {"model": {"path": str(model), "dtype": "float32"}}, "test")
    step = checkpoint_folder(tmp_path / "run", 20)
    (step / "policy").mkdir(parents=True)
    with single_process_group():
        parallel = start_parallel(settings.layout, 0, 600.0)
        save_policy(Policy(settings, parallel, with_reference=False), step / "policy")
        stop_parallel()
    write_manifest(step, TrainState(step=20))
    assert "policy/.metadata" in json.loads((step / "manifest.json").read_text())["files"]
    build(model, tmp_path / "run")
    file = largest(step, "*.distcp")
    flip_bit(file, file.stat().st_size // 2)
    choice = "or rename step_000020 to go on from the checkpoint before it"
    with pytest.raises(UserError, match=f"{file} {DIFFERS}, {choice}$"):
        build(model, tmp_path / "run")
    with pytest.raises(UserError, match=f"{file} {DIFFERS}"):
        to_hf(step, tmp_path / "back", model, False, ignore)
