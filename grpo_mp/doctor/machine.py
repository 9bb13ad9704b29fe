"""Whether a machine is fit to train: what each thing that a run needs looks like here, good or not."""

import importlib.metadata
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

from grpo_mp import platform
from grpo_mp.config import Settings, SftSettings
from grpo_mp.distributed.ports import claim_ports
from grpo_mp.platform.device_check import check_device
from grpo_mp.platform.gpu_state import GpuState, peers_without_access, read_gpus
from grpo_mp.platform.machine_check import (
    SHARED_MEMORY,
    check_gpu,
    check_host_memory,
    check_peers,
    check_shared_memory,
    check_versions,
    installed_versions,
    quick_findings,
    shared_memory_free,
    tested_versions,
)
from grpo_mp.policy.parameter_bytes import DiskNeed, disk_need, policy_disk_need
from grpo_mp.rollout.server import check_temporary_folder
from grpo_mp.trainer.disk_check import check_disk
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.findings import Finding, Level
from grpo_mp.utils.phases import GIB

CPU_RANKS = 2  # that exchange tensors where there is no GPU
COMMAND = [sys.executable, "-m", "grpo_mp.doctor.exchange"]
EXCHANGE_LIMIT_S, IMPORT_LIMIT_S = 180.0, 300.0
PORTS = 32  # a rank, its engine, and what the engine starts
DEFAULT_MASTER_PORT = 29500  # torchrun's
WRITTEN_BYTES = 2**26  # to measure a disk
MAX_CLOCK_OFFSET_S = 5.0  # as between nodes
LEAST_OPEN_FILES = 4096
LINK_BYTES_PER_S, LEAST_LINK_SHARE = 25e9, 0.25  # of an NVLink in one direction (NVLink 3 and later), reached by NCCL
# What Megatron and SGLang load on a GPU, with the advice; what is required is in platform/device_check.py.
KERNELS = {
    "transformer_engine.pytorch": "build transformer-engine against this torch, as launch/README.md says",
    "torch_memory_saver": "install the engine as grpo-mp[gpu] does",
    "sgl_kernel": "install sglang-kernel of the tested set",
    "amp_C": "build apex against this torch, or uninstall it: TransformerEngine has its kernels",
    "deep_ep": "build DeepEP against this torch and NVSHMEM, or leave engine.args.moe_a2a_backend out",
    "deep_gemm": "install the tested sglang-kernel and DeepGEMM, or leave FP8 out",
    "flash_attn": "build flash-attn against this torch, or uninstall it",
}
OWNERS = {"amp_C": "apex"}  # of modules that a package with another name installs
REQUIRED = ("transformer_engine.pytorch", "torch_memory_saver", "sgl_kernel")  # on a GPU
RING = re.compile(r"Channel (\d+)/\d+ : +([\d ]+)$", re.MULTILINE)  # of NCCL's log
TRANSPORT = re.compile(r"Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\].* via (\w+)")


def examine(settings: Settings | SftSettings | None, exchange: bool = True) -> Iterator[Finding]:
    """Yield what is found about this machine, for a run of `settings` or for any.

    `exchange` False: nothing is sent between GPUs.
    """
    gpus = [*_gpus()] if platform.on_cuda() else []
    yield from _device(gpus)
    yield from _packages()
    yield from _kernels()
    yield from _memory()
    yield from _disk(settings)
    yield from _ports()
    if exchange:
        yield from examine_exchange(gpus)


def examine_quickly() -> list[Finding]:
    """Return what the ranks of a job on this machine look at when they start."""
    count = torch.cuda.device_count() if platform.on_cuda() else 1
    found = [finding for index in range(count) for finding in quick_findings(index)]
    return found or [Finding(Level.OK, "nothing that a start would refuse or warn of")]


def _gpus() -> Iterator[GpuState]:
    try:
        yield from read_gpus(range(torch.cuda.device_count()))
    except RuntimeError:
        return  # `_device` says so


def _device(gpus: Sequence[GpuState]) -> Iterator[Finding]:
    """Yield whether torch can compute, with the state of the GPUs."""
    count = torch.cuda.device_count() if platform.on_cuda() else 1
    for index in range(count):
        try:
            check_device(index)
        except UserError as error:
            yield Finding(Level.ERROR, str(error))
    if not platform.on_cuda():
        sentence = "no GPU that torch can use: runs here compute on the CPU"
        unseen = "not looked at: driver, clocks and memory errors of GPUs, NCCL, peer access, CUDA kernels"
        yield Finding(Level.OK, sentence, [f"torch {torch.__version__}", unseen])
        return
    for gpu in gpus:
        yield from check_gpu(gpu)
    if len(gpus) < count:
        advice = "install nvidia-ml-py, and a driver that fits: nvidia-smi should list all GPUs"
        yield Finding(Level.WARNING, f"the driver does not tell the state of {count} GPUs", (), advice)
    names = dict.fromkeys(gpu.name for gpu in gpus)
    lines = [f"torch {torch.__version__}, CUDA {torch.version.cuda}", *(gpu.text() for gpu in gpus)]
    if len(names) > 1:
        yield Finding(
            Level.WARNING, f"different GPUs in one machine: {', '.join(names)}", (), "all wait for the slowest"
        )
    yield Finding(Level.OK, f"{count} GPU{'s' * (count > 1)}", lines)
    blocked = peers_without_access(count)
    yield from check_peers(blocked, count)
    if count > 1 and not blocked:
        yield Finding(Level.OK, "every GPU reads every other one's memory")


def _packages() -> Iterator[Finding]:
    """Yield what is not of the tested set, of all packages that it names."""
    tested = tested_versions(platform.on_cuda())
    installed = installed_versions([*tested])
    differing = [*check_versions(installed, tested)]
    yield from differing
    if not tested:
        advice = "compare with launch/requirements-gpu.txt or -cpu.txt of the repository"
        yield Finding(Level.OK, "the tested set of versions is not on this machine", (), advice)
    elif not differing:
        yield Finding(Level.OK, f"{len(installed)} packages have the tested versions")


def _kernels() -> Iterator[Finding]:
    """Yield whether the packages with kernels load: each in a process of its own, which a broken one may end."""
    absent, loaded = [], []
    for module, advice in KERNELS.items():
        package = OWNERS.get(module, module.partition(".")[0])
        if find_spec(package) is None:
            required = platform.on_cuda() and module in REQUIRED
            absent.append(package)
            if required:
                yield Finding(Level.ERROR, f"{package} is not installed", (), advice)
        elif failure := import_failure(module):
            level = Level.ERROR if platform.on_cuda() and module in REQUIRED else Level.WARNING
            yield Finding(level, f"{package} is installed and does not load: {failure[-1]}", failure[:-1], advice)
        else:
            loaded.append(f"{package} {_version(package)}".rstrip())
    if loaded:
        yield Finding(Level.OK, f"packages with kernels that load: {', '.join(loaded)}")
    if absent:
        needed = "" if platform.on_cuda() else ", nor needed on a CPU"
        yield Finding(Level.OK, f"not installed{needed}: {', '.join(absent)}")


def import_failure(module: str) -> list[str]:
    """Return the last lines of what a process that imports a module says; none where that works.

    After torch, whose libraries extensions of it need.
    """
    command = [sys.executable, "-c", f"import torch, {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return [f"it takes more than {IMPORT_LIMIT_S:g} s"]
    if done.returncode == 0:
        return []
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return [*lines[-3:-1], lines[-1][:300]] if lines else [f"the process ended with status {done.returncode}"]


def _version(package: str) -> str:
    distributions = importlib.metadata.packages_distributions().get(package, [package])
    return " ".join(installed_versions(distributions).values())


def _memory() -> Iterator[Finding]:
    """Yield whether host memory, shared memory and open files suffice."""
    memory, shared = psutil.virtual_memory(), shared_memory_free()
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = [*check_shared_memory(shared, platform.on_cuda()), *check_host_memory(memory.available, memory.total)]
    yield from found
    if 0 <= files < LEAST_OPEN_FILES:
        sentence = f"a process may open {files} files: engines and their clients need more"
        yield Finding(Level.ERROR, sentence, (), f"raise the hard limit to {LEAST_OPEN_FILES} or more (ulimit -Hn)")
    if not found:
        sentence = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB of host memory are free"
        yield Finding(Level.OK, f"{sentence}, {SHARED_MEMORY} has {shared / GIB:.1f} GiB")


def _disk(settings: Settings | SftSettings | None) -> Iterator[Finding]:
    """Yield whether the disk of the run folder, or of this folder, is large and fast enough, and of the same time."""
    folder = settings.run.folder if settings else Path()
    place = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    try:
        check_temporary_folder()
        need = _disk_need(settings) if settings else None
        small = [*check_disk(folder, need)] if need else []
    except UserError as error:
        yield Finding(Level.ERROR, str(error))
        return
    for sentence in small:
        yield Finding(Level.WARNING, sentence)
    try:
        rate, offset_s = measure_disk(place)
    except OSError as error:
        sentence = f"{place.absolute()} cannot be written to ({error.strerror})"
        yield Finding(Level.ERROR, sentence, (), "choose another run.folder, or make room")
        return
    if abs(offset_s) > MAX_CLOCK_OFFSET_S:
        sentence = f"the clock of the disk of {place.absolute()} is {offset_s:+.1f} s off this machine's"
        yield Finding(
            Level.WARNING, sentence, (), "synchronize the clocks (chrony): logs and traces are read side by side"
        )
    free = shutil.disk_usage(place).free / GIB
    says = f"the disk of {place.absolute()} takes {rate / 1e6:.0f} MB/s, {free:.1f} GiB free"
    if not (settings and need):
        yield Finding(Level.OK, says)
        return
    seconds = need.checkpoint / rate
    sentence = f"{says}: a checkpoint of {need.checkpoint / GIB:.1f} GiB takes {seconds:.0f} s from one node"
    is_slow = seconds > settings.monitor.phase_timeout_s
    advice = "take a faster disk, or raise monitor.phase_timeout_s" if is_slow else ""
    yield Finding(Level.WARNING if is_slow else Level.OK, sentence, (), advice)


def _disk_need(settings: Settings | SftSettings) -> DiskNeed:
    """Return what a run may write. Raises UserError where its model cannot be read."""
    hf = settings.model.read_config()
    return disk_need(settings, hf) if isinstance(settings, Settings) else policy_disk_need(settings, hf)


def measure_disk(folder: Path) -> tuple[float, float]:
    """Write a file there; return bytes per second, and its time minus this machine's, in seconds. Raises OSError."""
    content = os.urandom(WRITTEN_BYTES)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".grpo_mp_") as file:
        started, now = time.perf_counter(), time.time()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - started
        offset_s = os.fstat(file.fileno()).st_mtime - now
    return WRITTEN_BYTES / seconds, offset_s if abs(offset_s) > seconds else 0.0


def _ports() -> Iterator[Finding]:
    """Yield whether the ports that a job takes are free."""
    try:
        claim = claim_ports(PORTS)
        claim.release()
        yield Finding(Level.OK, f"ports are free, such as {claim.ports[0]} to {claim.ports[-1]}")
    except UserError as error:
        yield Finding(Level.ERROR, str(error))
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", DEFAULT_MASTER_PORT))
        except OSError:
            sentence = f"torchrun's port {DEFAULT_MASTER_PORT} is taken"
            yield Finding(Level.WARNING, sentence, (), "give torchrun --master-port, or use grpo-mp train --ranks")


@dataclass(frozen=True)
class Exchange:
    """What the ranks of this machine exchange in bytes per second, and NCCL's own account of how."""

    ranks: int
    all_reduce: float
    all_to_all: float
    rings: tuple[str, ...] = ()
    transports: Mapping[str, int] | None = None  # connections by name: P2P, SHM, NET


def examine_exchange(gpus: Sequence[GpuState], count: int | None = None) -> Iterator[Finding]:
    """Yield whether this machine's ranks, one for each GPU or two of its CPU, exchange tensors, and how fast."""
    count = count or (torch.cuda.device_count() if platform.on_cuda() else CPU_RANKS)
    if count < 2:
        yield Finding(Level.OK, "one GPU: nothing is exchanged on this machine")
        return
    with tempfile.TemporaryDirectory() as scratch:
        try:
            exchange = run_exchange(Path(scratch), count)
        except UserError as error:
            advice = "look at the GPUs' links and at NCCL_* variables; NCCL_DEBUG=INFO says more"
            evidence = nccl_warnings(_logs(Path(scratch)))
            yield Finding(Level.ERROR, str(error), evidence, advice)
            return
    yield from judge_exchange(exchange, gpus)


def judge_exchange(exchange: Exchange, gpus: Sequence[GpuState]) -> Iterator[Finding]:
    """Yield whether the rates are those of the GPUs' links. Pure."""
    share = 2 * (exchange.ranks - 1) / exchange.ranks  # that each rank sends of an all-reduce's bytes
    bus = share * exchange.all_reduce
    library = "NCCL" if gpus else "gloo"
    rates = f"{exchange.all_reduce / 1e9:.2f} GB/s all-reduce ({bus / 1e9:.2f} on the bus)"
    rates += f", {exchange.all_to_all / 1e9:.2f} GB/s all-to-all"
    sentence = f"{library} between {exchange.ranks} ranks: {rates}"
    evidence = [f"ring {ring}" for ring in exchange.rings]
    transports = exchange.transports or {}
    evidence += [f"{number} connections by {name}" for name, number in transports.items()]
    links = min((gpu.links for gpu in gpus), default=0)
    if links and bus < LEAST_LINK_SHARE * links * LINK_BYTES_PER_S:
        most = links * LINK_BYTES_PER_S / 1e9
        advice = "look for NCCL_P2P_DISABLE, IOMMU and other jobs on these GPUs; nvidia-smi nvlink -s shows the links"
        yield Finding(Level.WARNING, f"{sentence}, of {most:.0f} GB/s that {links} NVLinks have", evidence, advice)
    elif links and set(transports) & {"SHM", "NET"}:
        advice = "unset NCCL_P2P_DISABLE; a container must see all GPUs of its NVLink domain"
        yield Finding(Level.WARNING, f"{sentence}; NCCL goes around the NVLinks", evidence, advice)
    else:
        yield Finding(Level.OK, sentence, evidence)


def run_exchange(scratch: Path, count: int) -> Exchange:
    """Start so many ranks that exchange tensors. Raises UserError where one fails, or none answers in time."""
    debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,P2P,SHM,NET"}
    environment = {**os.environ, **debug, "NCCL_DEBUG_FILE": str(scratch / "nccl_%p.log"), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*COMMAND, str(scratch), str(rank), str(count)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    deadline, answers = time.monotonic() + EXCHANGE_LIMIT_S, list[str]()
    try:
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            if process.returncode:
                last = (err.strip().splitlines() or [f"status {process.returncode}"])[-1]
                raise UserError(f"rank {rank} of {count} cannot exchange tensors: {one_line(last)}")
            answers.append(out)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{count} ranks of this machine exchange nothing within {EXCHANGE_LIMIT_S:g} s") from error
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    rates = [json.loads(answer.splitlines()[-1]) for answer in answers]
    rings, transports = read_nccl_log(_logs(scratch))
    all_reduce, all_to_all = (min(rate[name] for rate in rates) for name in ("all_reduce", "all_to_all"))
    return Exchange(count, all_reduce, all_to_all, rings, transports)


def _logs(scratch: Path) -> str:
    return "\n".join(file.read_text(errors="replace") for file in sorted(scratch.glob("nccl_*.log")))


def read_nccl_log(text: str, most: int = 4) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the first rings that NCCL's log names, and how many of its connections are by which transport. Pure."""
    rings = {int(match[1]): " ".join(match[2].split()) for match in RING.finditer(text)}
    transports: dict[str, int] = {}
    for match in TRANSPORT.finditer(text):
        transports[match[1]] = transports.get(match[1], 0) + 1
    return tuple(f"{number}: {rings[number]}" for number in sorted(rings)[:most]), transports


def nccl_warnings(text: str, most: int = 6) -> list[str]:
    """Return the last warnings of NCCL's log. Pure."""
    return [line[-300:] for line in text.splitlines() if " NCCL WARN " in line][-most:]
