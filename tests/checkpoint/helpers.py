"""Policies of a folder, and files as a bad disk, a bad copy or a stranger leaves them."""

import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from grpo_mp.checkpoint.hf_writer import SHARD_BYTES, begin_hf, complete_hf, write_shards
from grpo_mp.config import check_settings
from grpo_mp.policy.policy import Policy
from tests.minimal_settings import MINIMAL_SETTINGS
from tests.one_rank import one_rank_job


def write_hf(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], like: Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write tensors as a Hugging Face folder, as one rank that exports them."""
    begin_hf(folder)
    complete_hf(folder, write_shards(folder, tensors, 0, shard_bytes), like)


def no_progress(written: int, total: int) -> None:
    """Ignore the progress of a conversion."""


@contextmanager
def policy_of(
    model: Path,
    dtype: str,
    with_reference: bool = False,
    family: str | None = None,
    megatron_args: dict[str, Any] | None = None,
) -> Iterator[Policy]:
    """Load a folder as a run of one rank does."""
    tree = {
        "training": {"megatron_args": megatron_args or {}},
        "run": {"folder": model.parent, "steps": 1},
        "model": {"path": model, "dtype": dtype, "family": family},
        "data": {"train": "nothing"},
        "rollout": {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 64, "max_response_tokens": 64},
        "reward": {"answer": 1.0},
        "optimizer": MINIMAL_SETTINGS["optimizer"],
    }
    settings = check_settings(tree, "test")
    with one_rank_job() as parallel:
        yield Policy(settings, parallel, with_reference)


def flip_bit(file: Path, byte: int, bit: int = 3) -> None:
    content = bytearray(file.read_bytes())
    content[byte] ^= 1 << bit
    file.write_bytes(content)


class Mkdir:
    """Unpickled without restrictions, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def malicious_pickle(folder: Path) -> bytes:
    return pickle.dumps(Mkdir(folder), protocol=2)  # as torch.save has it
