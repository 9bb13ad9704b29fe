"""Weights that a disk or a copy changed are found by checksum, by everything that reads them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_mp.checkpoint.convert import to_hf, to_megatron
from grpo_mp.checkpoint.converted_reader import open_weights
from grpo_mp.checkpoint.describe import describe_hf
from grpo_mp.checkpoint.manifest import CONVERSION_RECORD
from grpo_mp.checkpoint.run_state import (
    TrainState,
    checkpoint_folder,
    complete_checkpoints,
    own_checksums,
    write_manifest,
)
from grpo_mp.checkpoint.torch_dist_reader import describe_torch_dist
from grpo_mp.config import check_settings
from grpo_mp.trainer.job import build_policy
from grpo_mp.trainer.resume import find_whole_checkpoint
from grpo_mp.utils.errors import UserError
from tests.checkpoint.helpers import flip_bit, no_progress, policy_of
from tests.minimal_settings import MINIMAL_SETTINGS
from tests.one_rank import one_rank_job
from tests.save_policy import save_policy

DIFFERS = "differs from its checksum: copy it again"


def start_policy(model: Path, run: Path) -> None:
    """Start a policy as a run of one rank does."""
    run_settings = {"folder": str(run), "steps": 3}
    tree = MINIMAL_SETTINGS | {"run": run_settings, "model": {"path": str(model), "dtype": "float32"}}
    settings = check_settings(tree, "test")
    with one_rank_job() as parallel:
        checkpoint, _ = find_whole_checkpoint(complete_checkpoints(run), parallel.job)
        build_policy(settings, parallel, TrainState(), checkpoint, with_reference=True)


def largest_file(folder: Path, pattern: str) -> Path:
    return max(folder.rglob(pattern), key=lambda file: file.stat().st_size)


def read_all(source: Path) -> None:
    with open_weights(source, verify=True) as reader:
        for name in reader.names:
            reader.read(name)


READERS: dict[str, Callable[[Path, Path], object]] = {
    "to-hf": lambda converted, new: to_hf(converted, new / "back", None, False, no_progress),
    "info": lambda converted, new: describe_torch_dist(converted),
    "check": lambda converted, new: read_all(converted),
    "train": lambda converted, new: start_policy(converted, new / "run"),
}


@pytest.mark.parametrize("reader", READERS)
def test_one_flipped_bit_of_a_converted_folder(reader: str, model: Path, tmp_path: Path) -> None:
    to_megatron(model, tmp_path / "megatron", no_progress)
    READERS[reader](tmp_path / "megatron", tmp_path / "before")
    file = largest_file(tmp_path / "megatron", "*.distcp")
    flip_bit(file, file.stat().st_size // 2)
    with pytest.raises(UserError, match=f"{file} {DIFFERS}$"):
        READERS[reader](tmp_path / "megatron", tmp_path / "after")
    assert not (tmp_path / "after" / "back").exists()


def test_one_flipped_bit_of_a_folder_that_a_conversion_wrote(model: Path, tmp_path: Path) -> None:
    to_megatron(model, tmp_path / "megatron", no_progress)
    to_hf(tmp_path / "megatron", tmp_path / "back", None, False, no_progress)
    assert describe_hf(tmp_path / "back").checksums == "1 files agree"
    assert describe_hf(model).checksums == "none are recorded"
    file = tmp_path / "back" / "model.safetensors"
    flip_bit(file, file.stat().st_size // 2)
    readers: list[Callable[[], object]] = [
        lambda: describe_hf(tmp_path / "back"),
        lambda: read_all(tmp_path / "back"),
        lambda: to_megatron(tmp_path / "back", tmp_path / "again", no_progress),
        lambda: start_policy(tmp_path / "back", tmp_path / "run"),
    ]
    for read in readers:
        with pytest.raises(UserError, match=f"{file} {DIFFERS}$"):
            read()


@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json"])
def test_metadata_files_have_checksums(name: str, model: Path, tmp_path: Path) -> None:
    to_megatron(model, tmp_path / "megatron", no_progress)
    file = tmp_path / "megatron" / name
    for byte in range(0, file.stat().st_size, max(file.stat().st_size // 20, 1)):
        flip_bit(file, byte)
        with pytest.raises(UserError, match=DIFFERS):
            describe_torch_dist(tmp_path / "megatron")
        flip_bit(file, byte)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"parts": {"part_00000": {"a": {"bytes": "many"}}}}'])
def test_a_torn_record_is_refused(text: str, model: Path, tmp_path: Path) -> None:
    to_megatron(model, tmp_path / "megatron", no_progress)
    (tmp_path / "megatron" / CONVERSION_RECORD).write_text(text)
    with pytest.raises(UserError, match=r"conversion.json(: not valid JSON| is damaged).* copy (it|the file) again"):
        describe_torch_dist(tmp_path / "megatron")


def test_a_run_does_not_resume_from_a_changed_checkpoint(model: Path, tmp_path: Path) -> None:
    step = checkpoint_folder(tmp_path / "run", 20)
    (step / "policy").mkdir(parents=True)
    with policy_of(model, "float32") as policy:
        save_policy(policy, step / "policy")
    write_manifest(step, TrainState(step=20), own_checksums(step, 0, 1))
    assert "policy/.metadata" in json.loads((step / "manifest.json").read_text())["files"]
    start_policy(model, tmp_path / "run")
    hint = "or rename step_000020 to resume from the one before"
    for file in (largest_file(step / "policy" / "optimizer", "*.distcp"), next((step / "policy").glob("*.distcp"))):
        flip_bit(file, file.stat().st_size // 2)
        with pytest.raises(UserError, match=f"{file} {DIFFERS}, {hint}$"):
            start_policy(model, tmp_path / "run")
        if file.parent.name == "optimizer":
            flip_bit(file, file.stat().st_size // 2)
    with pytest.raises(UserError, match=f"{file} {DIFFERS}"):
        to_hf(step, tmp_path / "back", model, False, no_progress)
