"""Speed of a run's Hugging Face export beside a plain write: `python -m tests.bench.export_speed [--folder DIR]`.

One rank, and two with experts divided, export a bfloat16 mixture of 300 million parameters in bfloat16 and in blockwise
FP8. After each export rank 0 alone writes as many bytes, one after the other, to a file on the same disk and waits
until they are there (fsync), as the export does. Printed are the medians of both and their ratio.

Reach: 0.7 of the plain write's rate; exit status 1 below it. Cores that quantize and a disk that is faster than they
are do not reach it.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from grpo_mp.config import Settings, check_settings
from grpo_mp.distributed.process_groups import start_parallel, stop_parallel
from grpo_mp.policy.policy import Policy
from grpo_mp.trainer.save import export_policy
from tools.tiny.models import make_tiny, make_tokenizer

RATIOS, REACH = "ratios", 0.7
REPEATS, LIMIT_S, CHUNK = 3, 300.0, os.urandom(2**24)
SHAPE = {"hidden_size": 1024, "head_dim": 128, "moe_intermediate_size": 1024, "num_experts": 32, "num_hidden_layers": 3}
FOLDER = "GRPO_MP_BENCH_FOLDER"  # tells the ranks where the model is


def main() -> None:
    """Make the model and start the ranks; in a rank, export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("."), help="where the temporary folder stands")
    given = parser.parse_args()
    if FOLDER in os.environ:
        run_rank(Path(os.environ[FOLDER]))
        return
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="export_speed_") as folder:
        make_tiny(Path(folder) / "model", "qwen3_moe", make_tokenizer([]), **SHAPE)
        environment = os.environ | {FOLDER: folder, "OMP_NUM_THREADS": "1"}
        for ranks in (1, 2):
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            subprocess.run([*launch, "-m", "tests.bench.export_speed"], env=environment, check=True)
        sys.exit(min(map(float, (Path(folder) / RATIOS).read_text().split())) < REACH)


def run_rank(folder: Path) -> None:
    """Export as one of the ranks; rank 0 prints a line for each format."""
    torch.set_num_threads(1)
    ranks, target = int(os.environ["WORLD_SIZE"]), folder / "export"
    settings = settings_of(folder, ranks)
    parallel = start_parallel(settings.layout, settings.run.seed, LIMIT_S)
    policy, bucket_bytes = Policy(settings, parallel, with_reference=False), settings.sync.bucket_bytes
    for name, fp8 in (("bfloat16", False), ("FP8", True)):
        export_s, plain_s, size = [], [], 0
        for _ in range(1 + REPEATS):
            export_s.append(seconds(lambda: export_policy(policy, target, settings.model.path, bucket_bytes, fp8)))  # noqa: B023
            if parallel.rank == 0:
                size = sum(file.stat().st_size for file in target.iterdir())
                shutil.rmtree(target)
            plain_s.append(seconds(lambda: write_plain(folder / "plain", size) if parallel.rank == 0 else None))  # noqa: B023
        if parallel.rank == 0:
            rates = [size / median(times[1:]) / 1e9 for times in (export_s, plain_s)]
            with (folder / RATIOS).open("a") as file:
                file.write(f"{rates[0] / rates[1]}\n")
            spread = ", ".join(f"{time_s:.2f}" for time_s in export_s[1:])
            print(
                f"{ranks} ranks, {name:9}{size / 1e9:6.2f} GB: export {rates[0]:.3f} GB/s ({spread} s), plain write "
                f"{rates[1]:.3f} GB/s, ratio {rates[0] / rates[1]:.2f}",
                flush=True,
            )
    stop_parallel()


def seconds(work: Callable[[], object]) -> float:
    """Return the time from when all ranks begin until all have ended."""
    os.sync()
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def write_plain(file: Path, size: int) -> None:
    """Write so many bytes and wait for the disk; the file is then deleted."""
    with file.open("wb") as stream:
        for begin in range(0, size, len(CHUNK)):
            stream.write(CHUNK[: size - begin])
        stream.flush()
        os.fsync(stream.fileno())
    file.unlink()


def settings_of(folder: Path, ranks: int) -> Settings:
    tree = {
        "run": {"folder": str(folder / "run"), "steps": 1},
        "model": {"path": str(folder / "model"), "dtype": "bfloat16"},
        "layout": {"expert": ranks},
        "data": {"train": "unused"},
        "rollout": {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 8, "max_response_tokens": 8},
        "reward": {"length": 1.0},
        "optimizer": {"lr": 1e-6},
    }
    return check_settings(tree, "the benchmark")


if __name__ == "__main__":
    main()
