"""Check whether a machine is fit for training."""

import ctypes
import json
import os
import resource
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
from grpo_mp.platform.cuda_libraries import check_engine_libraries, cuda_environment
from grpo_mp.platform.machine_check import DRIVER, check_device
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.findings import Finding, Level
from grpo_mp.utils.phases import GIB

CORE = {  # package -> module
    **{"torch": "torch", "megatron-core": "megatron.core", "sglang": "sglang", "transformers": "transformers"},
    "transformer-engine": "transformer_engine",
}
SHARED_MEMORY = "/dev/shm"
ENOUGH_SHARED_BYTES = 2**30
LEAST_GLIBC = (2, 34)  # of SGLang's wheels
# Compiled kernels
CACHES = Path("~/.cache")
ENOUGH_CACHE_BYTES = 2 * 2**30
INFINIBAND = Path("/sys/class/infiniband")
PEER_MEMORY = Path("/sys/module/nvidia_peermem")  # module of the kernel by which network cards read GPU memory
SLOW_SHARE = 0.9  # rate of a GPU / rate of the fastest of the machine
# Size of the multiplied matrices
MATRIX = 8192
MATRIX_REPEATS = 20
CPU_RANKS = 2  # ranks that exchange tensors on a machine without a GPU
EXCHANGE_LIMIT_S = 180.0
IMPORT_LIMIT_S = 300.0
# Size of the exchanged tensor
CUDA_BYTES = 2**28
CPU_BYTES = 2**22
REPEATS = 5
# Modules with compiled kernels that Megatron and SGLang load on a GPU -> advice if the import fails.
KERNELS = {
    "transformer_engine.pytorch": "build transformer-engine against this torch, as launch/README.md says",
    "torch_memory_saver": "install the engine as grpo-mp[gpu] does",
    "sgl_kernel": "install sglang-kernel of the tested set",
    "amp_C": "build apex against this torch, or uninstall it: TransformerEngine has its kernels",
    "deep_ep": "build DeepEP against this torch and NVSHMEM, or leave engine.args.moe_a2a_backend out",
    "deep_gemm": "install the tested sglang-kernel and DeepGEMM, or leave FP8 out",
    "flash_mla": "install sgl-flash-mla of the tested set, or leave engine.args.attention_backend=flashmla out",
    "flashinfer": "install flashinfer-python of the tested set",
    "fla.ops.gated_delta_rule": "install fla-core of the tested set, or train no model with linear attention",
    "flash_attn": "build flash-attn against this torch, or uninstall it",
}
OWNERS = {"amp_C": "apex"}  # module -> package, where the names differ
REQUIRED = ("transformer_engine.pytorch", "torch_memory_saver", "sgl_kernel", "flashinfer")  # required on a GPU


def examine() -> Iterator[Finding]:
    """Yield the findings of all checks, good and bad."""
    count = torch.cuda.device_count() if platform.on_cuda() else 1
    yield from check_devices(count)
    if platform.on_cuda():
        yield from check_engines()
        yield from check_network(INFINIBAND)
    yield from check_memory()
    yield from check_caches(CACHES.expanduser())
    yield Finding(Level.OK, ", ".join(f"{name} {version(name)}" for name in CORE if find_spec(CORE[name])))
    yield from check_kernels()
    yield from check_exchange(count if platform.on_cuda() else CPU_RANKS)


def check_engines() -> Iterator[Finding]:
    """Yield an error if SGLang's wheels do not fit, or if an engine's processes cannot start or compile kernels."""
    glibc = str(os.confstr("CS_GNU_LIBC_VERSION")).rpartition(" ")[2]
    if tuple(map(int, glibc.split("."))) < LEAST_GLIBC:
        sentence = f"glibc is {glibc}, and SGLang's kernels need {'.'.join(map(str, LEAST_GLIBC))}"
        yield Finding(Level.ERROR, sentence, (), "use a newer system, or a container of one (launch/README.md)")
    try:
        check_engine_libraries(os.environ)
    except UserError as error:
        yield Finding(Level.ERROR, str(error))


def check_network(infiniband: Path) -> Iterator[Finding]:
    """Yield the active InfiniBand ports, and warnings if NCCL and NVSHMEM cannot use them. `infiniband`: in sysfs."""
    ports = [state.parent for state in sorted(infiniband.glob("*/ports/*/state")) if "ACTIVE" in state.read_text()]
    if not ports:
        yield Finding(Level.OK, "no InfiniBand port is active: NCCL uses TCP between nodes, DeepEP works inside a node")
        return
    yield Finding(Level.OK, f"active InfiniBand ports: {', '.join(f'{port.parts[-3]}/{port.name}' for port in ports)}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY:
        sentence = f"{locked // 1024} KiB of memory may be locked: NCCL cannot register buffers for InfiniBand"
        yield Finding(
            Level.WARNING, sentence, (), "set memlock to unlimited (limits.conf; Slurm: PropagateResourceLimits)"
        )
    if not PEER_MEMORY.exists():
        sentence = "nvidia_peermem is not loaded: NCCL and DeepEP between nodes may fail, or copy through the host"
        yield Finding(Level.WARNING, sentence, (), "modprobe nvidia_peermem; not needed where the driver has DMA-BUF")
    try:
        ctypes.CDLL("libmlx5.so.1")
    except OSError as error:
        sentence = f"libmlx5.so.1 does not load, and DeepEP between nodes needs it: {one_line(error)}"
        yield Finding(Level.WARNING, sentence, (), "install rdma-core (Debian: ibverbs-providers)")


def check_caches(folder: Path) -> Iterator[Finding]:
    """Yield an error if compiled kernels cannot be kept in `folder`, or a warning if it may become full."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = psutil.disk_usage(str(folder)).free
    except OSError as error:
        sentence = f"engines cannot keep compiled kernels in {folder}: {one_line(error)}"
        yield Finding(Level.ERROR, sentence, (), "set HOME to a folder that can be written")
        return
    if free < ENOUGH_CACHE_BYTES:
        sentence = f"{folder} has {free / GIB:.1f} GiB free, compiled kernels take up to {ENOUGH_CACHE_BYTES / GIB:.0f}"
        yield Finding(Level.WARNING, sentence, (), "set HOME to a larger disk, or delete files")


def check_memory() -> Iterator[Finding]:
    """Yield how much host memory is free, and a warning if NCCL may have too little shared memory for its buffers."""
    memory = psutil.virtual_memory()
    free = psutil.disk_usage(SHARED_MEMORY).free
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
    rates = [matrix_tflops(index) for index in range(count)]
    for index, rate in enumerate(rates):
        if rate < SLOW_SHARE * max(rates):
            sentence = f"GPU {index} multiplies matrices at {rate:.0f} TFLOP/s, the fastest at {max(rates):.0f}"
            advice = "all ranks wait for it: look at its clocks, power and temperature (nvidia-smi -q -d PERFORMANCE)"
            yield Finding(Level.WARNING, sentence, (), advice)
    if len(set(names)) > 1:
        sentence = f"different GPUs in one machine: {', '.join(dict.fromkeys(names))}"
        yield Finding(Level.WARNING, sentence, (), "all ranks wait for the slowest")
    driver = DRIVER.read_text().splitlines()[0] if DRIVER.exists() else "unknown driver"
    lines = [f"torch {torch.__version__}, CUDA {torch.version.cuda}; {driver}"]
    lines += [f"GPU {index}: {name}, {rates[index]:.0f} TFLOP/s" for index, name in enumerate(names)]
    yield Finding(Level.OK, f"{count} GPU{'s' * (count > 1)}", lines)


def matrix_tflops(index: int) -> float:
    """Return the rate of a GPU's matrix products in bfloat16 [TFLOP/s]."""
    with torch.cuda.device(index):
        matrix = torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)
        seconds = _seconds(lambda: [matrix @ matrix for _ in range(MATRIX_REPEATS)])
    return MATRIX_REPEATS * 2 * MATRIX**3 / seconds / 1e12


def check_kernels() -> Iterator[Finding]:
    """Import each package with kernels in its own process, since a broken package may crash; yield the results."""
    absent = []
    loaded = []
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
    environment = {**os.environ, **cuda_environment(os.environ)}  # as an engine's
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=False
        )
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
    """Return the bytes per second of a collective; its first call opens the connections."""
    return data.nbytes / _seconds(collective)


def _seconds(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several calls, without the first."""
    seconds = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        work()
        platform.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
