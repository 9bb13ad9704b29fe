"""Speed and memory of `grpo-mp convert` beside `cp -r`: `python -m tests.bench.convert_speed [--gb 12] [--fp8]`.

A Qwen3-MoE folder with the widths of Qwen3-30B-A3B and as many layers as make up its size, random values, is copied,
converted to torch_dist, converted back and checked, each in a process of its own, and copied again after each: a
job is compared with the mean rate of the copies before and after it, since disks and machines change pace. A job's
time is from the start of its process until `sync` returns; before it, its source is dropped from the page cache. A
rate is the source's bytes over that time: of bfloat16, or with `--fp8` the FP8 bytes that cp reads, for to-megatron
(which writes twice as many) as for to-hf (which reads twice as many, and the source once more to keep what has not
changed).

Reach: 0.5 of cp's rate, 0.25 with FP8; at most 3 GiB and twice the largest tensor in memory, as resident (the kernel's
VmHWM: with mapped files) and as private memory (RssAnon, looked at every 20 ms). Exit status 1 below the reach.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from grpo_mp.models.families import family_of
from grpo_mp.models.fp8 import FP8, SCALE, scale_shape
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param
from tests.checkpoint.helpers import write_hf
from tools.tiny.models import PUBLISHED_KEYS, make_tiny, make_tokenizer

CONFIG: dict[str, Any] = {  # Qwen3-30B-A3B
    "hidden_size": 2048,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
SHARD_BYTES = 2**30
REACH = {"to-megatron": (0.5, 0.25), "to-hf": (0.5, 0.25)}  # bfloat16, FP8
GIB = 2**30
TOOL = [sys.executable, "-m", "grpo_mp", "convert"]


@dataclass(frozen=True)
class Outcome:
    """One job: its seconds and its peak memory in bytes."""

    seconds: float
    resident: int
    private: int


def main() -> None:
    """Make the folder, run the jobs, print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=12.0, help="size of the folder in bfloat16, GB")
    parser.add_argument("--fp8", action="store_true", help="projections in blockwise FP8")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where the temporary folder stands")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="convert_speed_") as scratch:
        raise SystemExit(0 if measure(Path(scratch), given.gb, given.fp8) else 1)


def measure(scratch: Path, gb: float, fp8: bool) -> bool:
    """Whether everything is within reach."""
    model, copy, megatron, back = (scratch / name for name in ("model", "copy", "megatron", "back"))
    largest = make_folder(model, gb, fp8)
    size, bound = folder_bytes(model), 3 * GIB + 2 * largest
    print(f"{size / 1e9:.2f} GB, largest tensor {largest / GIB:.2f} GiB, bound {bound / GIB:.2f} GiB", flush=True)
    back_source = ["--fp8", "--like", str(model)] if fp8 else []
    copying = ["cp", "-r", str(model), str(copy)]
    jobs: dict[str, tuple[list[str], Path]] = {
        "to-megatron": ([*TOOL, "to-megatron", str(model), str(megatron)], model),
        "to-hf": ([*TOOL, "to-hf", str(megatron), str(back), *back_source], megatron),
        "check": ([*TOOL, "check", str(model), str(back)], back),
    }
    good = True
    copied = _say("cp -r", run(copying, model), size)
    for name, (command, source) in jobs.items():
        outcome = run(command, source)
        rate = _say(name, outcome, size)
        shutil.rmtree(copy)
        if name == "to-hf":
            shutil.rmtree(megatron)  # room on the disk
        before, copied = copied, _say("cp -r", run(copying, model), size)
        ratio = rate / ((before + copied) / 2)
        print(f"{name:12}{ratio:7.2f} of cp", flush=True)
        good &= ratio >= REACH.get(name, (0.0, 0.0))[fp8] and max(outcome.resident, outcome.private) <= bound
    return good


def _say(name: str, outcome: Outcome, size: int) -> float:
    """Print a line; returns the rate, GB/s."""
    rate = size / outcome.seconds / 1e9
    resident, private = outcome.resident / GIB, outcome.private / GIB
    print(
        f"{name:12}{outcome.seconds:8.1f} s{rate:8.3f} GB/s{resident:8.2f} GiB resident{private:8.2f} GiB private",
        flush=True,
    )
    return rate


def run(command: list[str], source: Path) -> Outcome:
    """Run one job and wait for the disk. Raises CalledProcessError where it fails."""
    drop_from_cache(source)
    os.sync()
    start, resident, private = time.monotonic(), 0, 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        resident = max(resident, _kilobytes(status, "VmHWM"))
        private = max(private, _kilobytes(status, "RssAnon"))
        time.sleep(0.02)
    os.sync()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Outcome(time.monotonic() - start, resident, private)


def _kilobytes(status: str, field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0  # a process that is ending has none


def drop_from_cache(folder: Path) -> None:
    """So that the next job reads the folder from the disk."""
    for file in filter(Path.is_file, folder.rglob("*")):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def make_folder(folder: Path, gb: float, fp8: bool) -> int:
    """Returns the bytes of the largest tensor."""
    like = folder.with_name("like")
    make_tiny(like, "qwen3_moe", make_tokenizer([]), num_hidden_layers=1, hidden_size=64)
    config = json.loads((like / "config.json").read_text()) | PUBLISHED_KEYS["qwen3_moe"] | CONFIG
    one, two = (_bytes(_params(like, config | {"num_hidden_layers": count})) for count in (1, 2))
    layers = max(1, round((gb * 1e9 - one) / (two - one)) + 1)
    quantized = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}} if fp8 else {}
    config |= {"num_hidden_layers": layers} | quantized
    (like / "config.json").write_text(json.dumps(config))
    params = _params(like, config)
    write_hf(folder, random_tensors(params, fp8), like, SHARD_BYTES)
    return max(_bytes([param]) for param in params)


def _params(folder: Path, config: dict[str, Any]) -> list[Param]:
    hf = HfConfig(folder, config)
    return list(family_of(hf).params(hf).values())


def _bytes(params: Iterable[Param]) -> int:
    return sum(2 * prod(shape) for param in params for shape in param.shapes)


def random_tensors(params: Iterable[Param], fp8: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Stretches of one random row, each from another place of it; no two are equal."""
    row = torch.randn(2**26, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)
    begin = 0
    for param in params:
        for name, shape in zip(param.hf, param.shapes, strict=True):
            begin = (begin + 4099) % (row.numel() // 2)
            count = prod(shape)
            values = _stretch(row, begin, count).view(shape)
            if fp8 and param.is_projection:
                yield name, (values * 4000).clamp(-448, 448).to(FP8)
                yield name + SCALE, torch.rand(scale_shape(shape)) * 1e-3
            else:
                yield name, values.clone()


def _stretch(row: torch.Tensor, begin: int, count: int) -> torch.Tensor:
    columns = row[begin : begin + count]
    return columns if columns.numel() == count else row[begin:].repeat(-(-count // (row.numel() - begin)))[:count]


if __name__ == "__main__":
    main()
