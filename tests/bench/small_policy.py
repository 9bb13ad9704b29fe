"""What benches of one CPU rank share: a float32 policy of 46 million parameters, and its peaks of resident memory."""

import ctypes
import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from grpo_mp import platform
from grpo_mp.batching.microbatches import MicroBatchPlan
from grpo_mp.batching.packing import pack
from grpo_mp.config import Settings, check_settings
from grpo_mp.distributed.process_groups import Parallel, single_rank_environment, start_parallel, stop_parallel
from grpo_mp.utils.types import MicroBatch
from tests.bench.sync_memory import reset_peak, status_bytes
from tools.tiny.models import make_tiny, make_tokenizer

MIB, TOKENS = 2**20, 2048
SHAPE = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 32768}
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
GIVEN_BACK = 2**17  # bytes from which on glibc gives back what is freed


@contextmanager
def start_small_policy(**changes: Any) -> Iterator[tuple[Settings, Parallel]]:
    """Make the model's folder and the groups of one rank; memory that is freed is given back at once.

    `changes`: sections of the settings.
    """
    libc = ctypes.CDLL(None)
    assert libc.mallopt(M_MMAP_THRESHOLD, GIVEN_BACK)
    assert libc.mallopt(M_TRIM_THRESHOLD, GIVEN_BACK)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, single_rank_environment():
        settings = settings_of(Path(folder), **changes)
        make_tiny(Path(folder), "qwen3", make_tokenizer([]), **SHAPE)
        parallel = start_parallel(settings.layout, 0, 60.0)
        yield settings, parallel
        stop_parallel()


def settings_of(folder: Path, **changes: Any) -> Settings:
    rollout = {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 512, "max_response_tokens": 512}
    tree = {
        "run": {"folder": str(folder), "steps": 1},
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"train": "none"},
        "rollout": rollout,
        "reward": {"answer": 1.0},
        "optimizer": {"lr": 1e-4},
        "training": {"max_tokens_per_microbatch": TOKENS, "recompute": "full"},
        "sync": {"bucket_bytes": "256MiB"},
    }
    return check_settings(tree | changes, "bench")


def padding(tokens: int) -> MicroBatch:
    """Sequences of 128 tokens of padding: as much work and memory as real ones."""
    batch = pack({}, [], [], MicroBatchPlan(), align=1, pad_to=tokens)
    return replace(batch, lengths=(128,) * (tokens // 128), positions=torch.arange(128).repeat(tokens // 128))


def settled_bytes() -> int:
    """Resident memory of this process when all that is unused is given back."""
    gc.collect()
    platform.free_device_memory()
    return platform.host_bytes()


def peak_bytes(run: Callable[[], object]) -> int:
    """The highest resident memory while `run` runs."""
    settled_bytes()
    process = psutil.Process()
    reset_peak(process)
    run()
    return status_bytes(process, "VmHWM")
