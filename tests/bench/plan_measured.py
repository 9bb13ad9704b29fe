"""What the planner says of one CPU rank beside what is measured: python -m tests.bench.plan_measured

A float32 policy of 46 million parameters. Resident host memory grows by weights, gradients and moments when it is
built, and while it computes gradients its peak lies above that by activations and logits. Prints both in MiB and their
ratio; the exit status is 1 where one is off by more than a tenth.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from grpo_mp import platform
from grpo_mp.config import Settings, check_settings
from grpo_mp.data.pack import pack
from grpo_mp.data.schedule import MicroBatchPlan
from grpo_mp.data.tiny_tokenizer import make_tokenizer
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.tiny import make_tiny
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.job import make_job
from grpo_mp.planner.memory import Memory, Stretch, plan_memory
from grpo_mp.trainer.cold_start import Policy, alone, negative_log_likelihood, start_parallel, stop_parallel
from grpo_mp.types import MicroBatch
from tests.bench.sync_memory import reset_peak, status_bytes

REACH, MIB, TOKENS = 0.1, 2**20, 2048
STATE, WORKING = ("weights", "gradients", "optimizer"), ("activations", "logits")


def main() -> None:
    """Command line; see the text above."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, alone():
        settings = _settings(Path(folder))
        shape = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 32768}
        make_tiny(Path(folder), "qwen3", make_tokenizer([]), **shape)
        (planned,) = _plan(settings).device
        built, peak = _measure(settings)
    train = planned[Stretch.TRAIN]
    said = [sum(train[kind] for kind in kinds) for kinds in (STATE, WORKING)]
    ratios = [one / other for one, other in zip(said, (built, peak), strict=True)]
    for kinds, plan, found, ratio in zip((STATE, WORKING), said, (built, peak), ratios, strict=True):
        print(f"{' + '.join(kinds)}: planned {plan / MIB:.0f} MiB, measured {found / MIB:.0f} MiB, ratio {ratio:.3f}")
    raise SystemExit(any(abs(ratio - 1) > REACH for ratio in ratios))


def _settings(folder: Path) -> Settings:
    rollout = {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 512, "max_response_tokens": 512}
    tree = {
        "run": {"folder": str(folder), "steps": 1},
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"train": "none"},
        "rollout": rollout,
        "reward": {"answer": 1.0},
        "optimizer": {"lr": 1e-4, "max_tokens_per_microbatch": TOKENS, "recompute": "full"},
    }
    return check_settings(tree, "bench")


def _plan(settings: Settings) -> Memory:
    return plan_memory(make_job(settings, HfConfig.read(settings.model.path), read_cluster("h100-80"), 1, 1))


def _measure(settings: Settings) -> tuple[float, float]:
    """Bytes that the policy's state takes, and the peak above it while it computes gradients."""
    parallel = start_parallel(settings.layout, 0, 60.0)
    before = _settled()
    policy = Policy(settings, parallel, with_reference=False)
    policy.gradients([_batch(2)], negative_log_likelihood)  # touches every page, loads every kernel
    built = _settled()
    peak = _peak(lambda: policy.gradients([_batch(TOKENS)], negative_log_likelihood))
    stop_parallel()
    return built - before, peak - built


def _batch(tokens: int) -> MicroBatch:
    """Sequences of 128 tokens of padding: as much work and memory as real ones."""
    length = min(tokens, 128)
    batch = pack({}, [], [], MicroBatchPlan(), align=1, pad_to=tokens)
    return replace(
        batch, lengths=(length,) * (tokens // length), positions=torch.arange(length).repeat(tokens // length)
    )


def _settled() -> int:
    platform.free_device_memory()
    return platform.host_bytes()


def _peak(run: Callable[[], object]) -> int:
    """The highest resident memory while `run` runs."""
    process = psutil.Process()
    reset_peak(process)
    run()
    return status_bytes(process, "VmHWM")


if __name__ == "__main__":
    main()
