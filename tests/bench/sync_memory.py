"""Peak memory of a rank while weights are synchronized: `python -m tests.bench.sync_memory [--engines]`.

Two ranks hold a random Qwen3-MoE of some hundred MB, by expert and by tensor parallelism, and push it as the loop does,
each to an engine of its own: to a stand-in that only looks where the tensors lie, or, with `--engines`, to SGLang.
The peak is the kernel's mark of resident memory (VmHWM), reset before each push.

Reach: the peak is at most the model and sync.bucket_bytes; the last column is the one over the other. Exit status 1
where one is above 1.
"""

import argparse
import asyncio
import base64
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch.distributed as dist

from grpo_mp import platform
from grpo_mp.config import Settings, check_settings
from grpo_mp.distributed.process_groups import start_parallel, stop_parallel
from grpo_mp.policy.policy import Policy
from grpo_mp.rollout.client import EngineClient
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.shared_memory import open_exports
from grpo_mp.weight_sync.update import PolicyShards, WeightSync, build_weight_sync
from tests.engines import started_engine
from tools.tiny.models import make_tiny, make_tokenizer

RANKS, PUSHES, LIMIT_S = 2, 3, 300.0
LAYOUTS = ("expert", "tensor")
BUCKET = "64MiB"
MOST = 1.0
SHAPE = {"hidden_size": 512, "head_dim": 128, "moe_intermediate_size": 512, "num_experts": 32}
FOLDER = "GRPO_MP_BENCH_FOLDER"  # tells the ranks where the model is


def main() -> None:
    """Make the model and start the ranks; in a rank, push."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", action="store_true", help="push into two SGLang servers")
    parser.add_argument("--layout", choices=LAYOUTS, help="only this")
    given = parser.parse_args()
    if FOLDER in os.environ:
        run_rank(Path(os.environ[FOLDER]), given.layout, given.engines)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(Path(folder) / "model", "qwen3_moe", make_tokenizer([]), **SHAPE)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        ratios: list[float] = []
        environment = os.environ | {FOLDER: folder, "OMP_NUM_THREADS": "1"}
        print(
            f"{'layout':8}{'process':10}{'seconds':>8}{'model':>14}{'bucket':>14}{'above':>14}{'ratio':>8}", flush=True
        )
        for layout in [given.layout] if given.layout else LAYOUTS:
            arguments = ["--layout", layout, *(["--engines"] if given.engines else [])]
            ratios += list(shown([*launch, "-m", "tests.bench.sync_memory", *arguments], environment))
    raise SystemExit(max(ratios) > MOST)


def shown(command: list[str], environment: dict[str, str]) -> Iterator[float]:
    """Run ranks and print their lines; yield the ratio that each ends with."""
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith(LAYOUTS):  # libraries say something, too
                yield float(line.split()[-1])
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def run_rank(folder: Path, layout: str, engines: bool) -> None:
    """Push a few times; prints a line for each push and process."""
    settings = make_settings(folder, layout)
    parallel = start_parallel(settings.layout, settings.run.seed, LIMIT_S)
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        policy = Policy(settings, parallel, with_reference=False)
        watched, client = {f"rank {parallel.rank}": psutil.Process()}, StandIn()
        if engines:
            scheduler, client = stack.enter_context(running_engine(folder, parallel.rank))
            watched[f"engine {parallel.rank}"] = scheduler
        rollout = rollout_with(client, parallel.world_size, runner)
        sync = build_weight_sync(settings, PolicyShards.of_policy(policy), rollout, parallel.job)
        for version in range(PUSHES):
            dist.barrier(group=parallel.cpu_group)
            for line in measure_push(sync, version, policy, settings.sync.bucket_bytes, watched):
                sys.stdout.write(f"{layout:8}{line}\n")  # whole: the other rank writes, too
                sys.stdout.flush()
    stop_parallel()


def measure_push(
    sync: WeightSync, version: int, policy: Policy, bucket_bytes: int, watched: dict[str, psutil.Process]
) -> list[str]:
    """One push; a line about the peak of each process above what it held before."""
    platform.free_device_memory()
    before = {name: reset_peak(process) for name, process in watched.items()}
    report = sync.update_weights(version)
    shards = sum(tensor.nbytes for tensor in policy.tensors.values())
    weights = 4 * sum(param.num_elements for param in policy.params.values())
    lines = []
    for name, process in watched.items():
        model = weights if name.startswith("engine") else shards
        above = status_bytes(process, "VmHWM") - before[name]
        ratio = (model + above) / (model + bucket_bytes)
        sizes = "".join(f"{size / 2**20:10.1f} MiB" for size in (model, report.largest_round, above))
        lines.append(f"{name:10}{report.seconds:8.2f}{sizes}{ratio:8.2f}")
    return lines


def make_settings(folder: Path, layout: str) -> Settings:
    tree = {
        "run": {"folder": str(folder / "run"), "steps": 1},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "layout": {layout: RANKS},
        "data": {"train": "unused"},
        "rollout": {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 8, "max_response_tokens": 8},
        "reward": {"length": 1.0},
        "optimizer": {"lr": 1e-6},
        "sync": {"bucket_bytes": BUCKET},
    }
    return check_settings(tree, "the benchmark")


class StandIn:
    """Takes buckets in an engine's place and looks where their tensors lie, without reading them.

    An engine reads them in its own process; here the rank's memory would count twice what it reads.
    """

    index = 0

    async def begin_weight_update(self, with_draft: bool = False) -> None: ...

    async def update_weights_from_tensor(self, payloads: list[str], load_format: str | None = None) -> None:
        for payload in payloads:
            ((_, note),) = pickle.loads(base64.b64decode(payload))
            dict(open_exports(note))

    async def end_weight_update(self, version: int, keep_cache: bool = False) -> None: ...


def rollout_with(client: Any, ranks: int, runner: asyncio.Runner) -> Any:
    """What a weight sync asks of a Rollout: an engine on each rank, of which none is lost."""
    keeps = partial(nullcontext, client)
    return SimpleNamespace(host_ranks=range(ranks), client=client, call=runner.run, losing_engine=keeps)


@contextmanager
def running_engine(folder: Path, rank: int) -> Iterator[tuple[psutil.Process, EngineClient]]:
    """An SGLang server: the process that holds its weights, and a client."""
    spec = EngineSpec(rank, rank, folder / "model", "float32", context_tokens=64, cpu=not platform.on_cuda())
    with started_engine(spec, folder / f"engine_{rank}.log") as engine:
        engine.wait_ready(LIMIT_S)
        family = psutil.Process().children(recursive=True)
        scheduler = next(process for process in family if "scheduler" in " ".join(process.cmdline()))
        yield scheduler, EngineClient(rank, engine.url, engine.headers, LIMIT_S)


def reset_peak(process: psutil.Process) -> int:
    """Set the kernel's peak of a process to what it holds now, and return that in bytes."""
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")
    return status_bytes(process, "VmRSS")


def status_bytes(process: psutil.Process, field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
    assert match, f"no {field} in the status of process {process.pid}"
    return int(match.group(1)) * 1024


if __name__ == "__main__":
    main()
