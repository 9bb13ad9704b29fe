"""Check whether a machine is fit for training."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from grpo_mp import platform
from grpo_mp.platform.cuda_libraries import check_engine_libraries
from grpo_mp.platform.machine_check import check_device
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.findings import Finding, Level
from grpo_mp.utils.phases import GIB

CORE = {  # package -> module
    **{"torch": "torch", "megatron-core": "megatron.core", "sglang": "sglang", "transformers": "transformers"},
    "transformer-engine": "transformer_engine",
}
SHARED_MEMORY, ENOUGH_SHARED_BYTES = "/dev/shm", 2**30
CPU_RANKS = 2  # ranks that exchange tensors on a machine without a GPU
EXCHANGE_LIMIT_S, IMPORT_LIMIT_S = 180.0, 300.0
CUDA_BYTES, CPU_BYTES = 2**28, 2**22  # size of the exchanged tensor
REPEATS = 5
# Modules with compiled kernels that Megatron and SGLang load on a GPU -> advice if the import fails.
KERNELS = {
    "transformer_engine.pytorch": "build transformer-engine against this torch, as launch/README.md says",
    "torch_memory_saver": "install the engine as grpo-mp[gpu] does",
    "sgl_kernel": "install sglang-kernel of the tested set",
    "amp_C": "build apex against this torch, or uninstall it: TransformerEngine has its kernels",
    "deep_ep": "build DeepEP against this torch and NVSHMEM, or leave engine.args.moe_a2a_backend out",
    "deep_gemm": "install the tested sglang-kernel and DeepGEMM, or leave FP8 out",
    "flash_attn": "build flash-attn against this torch, or uninstall it",
}
OWNERS = {"amp_C": "apex"}  # module -> package, where the names differ
REQUIRED = ("transformer_engine.pytorch", "torch_memory_saver", "sgl_kernel")  # required on a GPU


def examine() -> Iterator[Finding]:
    """Yield the findings of all checks, good and bad."""
    count = torch.cuda.device_count() if platform.on_cuda() else 1
    yield from check_devices(count)
    if platform.on_cuda():
        yield from check_engines()
    yield from check_memory()
    yield Finding(Level.OK, ", ".join(f"{name} {version(name)}" for name in CORE if find_spec(CORE[name])))
    yield from check_kernels()
    yield from check_exchange(count if platform.on_cuda() else CPU_RANKS)


def check_engines() -> Iterator[Finding]:
    """Yield an error if the processes of an engine cannot start or find no CUDA toolkit."""
    try:
        check_engine_libraries(os.environ)
    except UserError as error:
        yield Finding(Level.ERROR, str(error))


def check_memory() -> Iterator[Finding]:
    """Yield how much host memory is free, and a warning if NCCL may have too little shared memory for its buffers."""
    memory, free = psutil.virtual_memory(), psutil.disk_usage(SHARED_MEMORY).free
    if platform.on_cuda() and free < ENOUGH_SHARED_BYTES:
        sentence = f"{SHARED_MEMORY} has {free / 2**20:.0f} MiB free: NCCL may fail where GPUs do not reach each other"
        yield Finding(Level.WARNING, sentence, (), "enlarge it (docker run --shm-size=16g), or empty it")
    host = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB of host memory are free"
    yield Finding(Level.OK, f"{host}, {SHARED_MEMORY} has {free / GIB:.1f} GiB")


def check_devices(count: int) -> Iterator[Finding]:
    """Yield an error for each device on which torch cannot compute, and a finding with the names of the GPUs."""
    for index in range(count):
        try:
            check_device(index)
        except UserError as error:
            yield Finding(Level.ERROR, str(error))
    if not platform.on_cuda():
        yield Finding(Level.OK, "no GPU that torch can use: runs here compute on the CPU")
        return
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    if len(set(names)) > 1:
        sentence = f"different GPUs in one machine: {', '.join(dict.fromkeys(names))}"
        yield Finding(Level.WARNING, sentence, (), "all ranks wait for the slowest")
    lines = [f"torch {torch.__version__}, CUDA {torch.version.cuda}"]
    lines += [f"GPU {index}: {name}" for index, name in enumerate(names)]
    yield Finding(Level.OK, f"{count} GPU{'s' * (count > 1)}", lines)


def check_kernels() -> Iterator[Finding]:
    """Import each package with kernels in its own process, since a broken package may crash; yield the results."""
    absent, loaded = [], []
    for module, advice in KERNELS.items():
        package = OWNERS.get(module, module.partition(".")[0])
        level = Level.ERROR if platform.on_cuda() and module in REQUIRED else Level.WARNING
        if find_spec(package) is None:
            absent.append(package)
            if level is Level.ERROR:
                yield Finding(level, f"{package} is not installed", (), advice)
        elif failure := import_failure(module):
            yield Finding(level, f"{package} is installed and does not load: {failure}", (), advice)
        else:
            loaded.append(package)
    yield Finding(Level.OK, f"packages with kernels that load: {', '.join(loaded) or 'none'}")
    if absent:
        yield Finding(Level.OK, f"not installed: {', '.join(absent)}")


def import_failure(module: str) -> str:
    """Import a module after torch in a new process; return the last line of the error, or "" on success."""
    command = [sys.executable, "-c", f"import torch, {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"it takes more than {IMPORT_LIMIT_S:g} s"
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"the process ended with status {done.returncode}"


def check_exchange(count: int) -> Iterator[Finding]:
    """Yield whether `count` ranks of this machine can exchange tensors, and at which rates."""
    if count < 2:
        yield Finding(Level.OK, "one GPU: nothing is exchanged on this machine")
        return
    try:
        all_reduce, all_to_all = run_exchange(count)
    except UserError as error:
        advice = "look at the GPUs' links and at NCCL_* variables; NCCL_DEBUG=INFO says more"
        yield Finding(Level.ERROR, str(error), (), advice)
        return
    library = "NCCL" if platform.on_cuda() else "gloo"
    rates = f"{all_reduce / 1e9:.2f} GB/s all-reduce, {all_to_all / 1e9:.2f} GB/s all-to-all"
    yield Finding(Level.OK, f"{library} between {count} ranks: {rates}")


def run_exchange(count: int) -> list[float]:
    """Start `count` ranks that exchange tensors; return the bytes per second of all-reduce and of all-to-all."""
    deadline = time.monotonic() + EXCHANGE_LIMIT_S
    with tempfile.TemporaryDirectory() as scratch:
        ranks = spawn(exchange, (scratch, count), count, join=False)
        try:
            while not ranks.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() > deadline:
                    raise UserError(f"{count} ranks of this machine exchange nothing within {EXCHANGE_LIMIT_S:g} s")
        except ProcessException as error:
            last = one_line(str(error).strip().splitlines()[-1])
            raise UserError(f"rank {error.error_index} of {count} cannot exchange tensors: {last}") from error
        finally:
            for process in ranks.processes:
                process.kill()
        return list(json.loads(Path(scratch, "rates.json").read_text()))


def exchange(rank: int, scratch: str, ranks: int) -> None:
    """Measure the exchange rates as one of the ranks of `run_exchange`; rank 0 writes the rates to `scratch`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if platform.on_cuda():
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{scratch}/store", ranks)
    limit = timedelta(seconds=EXCHANGE_LIMIT_S)
    dist.init_process_group(platform.backend(), store=store, rank=rank, world_size=ranks, timeout=limit)
    data = torch.zeros((CUDA_BYTES if platform.on_cuda() else CPU_BYTES) // 4, device=platform.device())
    data = data[: data.numel() // ranks * ranks]
    out = torch.empty_like(data)
    rates = [_rate(data, lambda: dist.all_reduce(data)), _rate(data, lambda: dist.all_to_all_single(out, data))]
    if rank == 0:
        Path(scratch, "rates.json").write_text(json.dumps(rates))
    dist.destroy_process_group()


def _rate(data: torch.Tensor, collective: Callable[[], object]) -> float:
    """Return the bytes per second of the fastest of several calls; the first call opens the connections."""
    seconds = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        collective()
        platform.synchronize()
        seconds.append(time.perf_counter() - start)
    return data.nbytes / min(seconds)
