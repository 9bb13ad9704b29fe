"""Measure the rates of this machine that plans assume: matrix products, memory, links, disk."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from grpo_mp import platform
from grpo_mp.doctor.machine import run_exchange
from grpo_mp.utils.phases import GIB

GB = 1e9
LINK_SHARE = 0.70  # achievable share of a link's peak rate, as in the shipped cluster profiles


def measure_rates(folder: Path) -> dict[str, float]:
    """Return values of a cluster profile by name. nvlink_gb_s is the peak: the measured rate / LINK_SHARE."""
    on_cuda = platform.on_cuda()
    size = 8192 if on_cuda else 512
    rates = {
        "bf16_tflops": matmul_tflops(size),
        "device_memory_gb_s": copy_rate(size * size * 16) / GB,
        "disk_gb_s": disk_rate(folder, (1 << 30) if on_cuda else (1 << 26)) / GB,
        "host_memory_gib": psutil.virtual_memory().total / GIB,
    }
    if on_cuda:
        _, total = torch.cuda.mem_get_info()
        rates |= {"gpu_memory_gib": total / GIB, "gpus_per_node": torch.cuda.device_count()}
        rates["host_link_gb_s"] = host_copy_rate(pinned=True) / GB
        rates["host_copy_gb_s"] = host_copy_rate(pinned=False) / GB
        if torch.cuda.device_count() > 1:
            all_reduce, _ = run_exchange(torch.cuda.device_count())
            rates["nvlink_gb_s"] = all_reduce / GB / LINK_SHARE
    return {name: float(f"{value:.4g}") for name, value in rates.items()}


def matmul_tflops(size: int) -> float:
    """Return the TFLOP/s of a product of square matrices in bfloat16, or in float32 on a CPU."""
    dtype = torch.bfloat16 if platform.on_cuda() else torch.float32
    one, other = (torch.randn(size, size, device=platform.device(), dtype=dtype) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: one @ other) / 1e12


def copy_rate(nbytes: int) -> float:
    """Return the bytes read plus written per second of a copy within device memory."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=platform.device())
    target = torch.empty_like(source)
    return 2 * nbytes / seconds_of(lambda: target.copy_(source))


def host_copy_rate(pinned: bool, nbytes: int = 1 << 30) -> float:
    """Return the bytes per second of a copy from host to device."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty_like(source, device=platform.device())
    return nbytes / seconds_of(lambda: target.copy_(source, non_blocking=True))


def disk_rate(folder: Path, nbytes: int) -> float:
    """Return the bytes written to disk per second, including fsync."""
    file = folder / "disk_rate.bin"
    block = os.urandom(1 << 20)
    started = time.monotonic()
    with file.open("wb") as out:
        for _ in range(nbytes >> 20):
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
    file.unlink()
    return nbytes / (time.monotonic() - started)


def seconds_of(compute: Callable[[], object], runs: int = 5) -> float:
    """Return the shortest duration of `runs` calls after a warm-up call."""
    times = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        compute()
        if platform.on_cuda():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])
