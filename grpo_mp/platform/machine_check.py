"""What is wrong with a machine, as far as milliseconds show it: each job looks at its start; see doctor/machine.py."""

import importlib.metadata
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import torch

from grpo_mp import platform
from grpo_mp.platform.gpu_state import GpuState, peers_without_access, read_gpus
from grpo_mp.utils.findings import Finding, Level

SHARED_MEMORY = Path("/dev/shm")
LAUNCH = Path(__file__).parents[2] / "launch"  # beside the package in a checkout
CORE = ("torch", "megatron-core", "sglang", "transformers", "transformer-engine")  # whose version a run depends on
# NCCL keeps buffers of ranks that do not reach each other's GPU in shared memory, engines their load.
LEAST_SHARED_BYTES, ENOUGH_SHARED_BYTES = 2**24, 2**30
MIN_FREE_SHARE = 0.1  # of host memory
MOST_PAIRS = 8  # that evidence lists


def quick_findings(local_rank: int) -> list[Finding]:
    """Return what is wrong for one rank; the first of a node looks at what its ranks share, too.

    An error is a reason to refuse the start; what is in order is left out.
    """
    found = [*check_gpus(local_rank)] if platform.on_cuda() else []
    if local_rank == 0:
        found += [*check_versions(installed_versions(CORE), tested_versions(platform.on_cuda()))]
        found += [*check_shared_memory(shared_memory_free(), platform.on_cuda())]
        memory = psutil.virtual_memory()
        found += [*check_host_memory(memory.available, memory.total)]
        if platform.on_cuda():
            count = torch.cuda.device_count()
            found += [*check_peers(peers_without_access(count), count)]
    return found


def check_gpus(*indices: int) -> Iterator[Finding]:
    """Yield what is wrong with GPUs, by torch's numbers."""
    try:
        gpus = read_gpus(indices)
    except RuntimeError as error:
        advice = "read `dmesg | grep -i xid`, reset the GPU, or choose others (CUDA_VISIBLE_DEVICES)"
        yield Finding(Level.WARNING, f"the state of GPU {', '.join(map(str, indices))} is unknown: {error}", (), advice)
        return
    for gpu in gpus:
        yield from check_gpu(gpu)


def check_gpu(gpu: GpuState) -> Iterator[Finding]:
    """Yield what is wrong with a GPU. Pure."""
    if gpu.remap_failed:
        sentence = f"GPU {gpu.index}: a row of its memory is broken and cannot be replaced"
        yield Finding(Level.ERROR, sentence, [gpu.text()], "take it out of service (CUDA_VISIBLE_DEVICES), replace it")
    elif gpu.uncorrected_errors:
        sentence = f"GPU {gpu.index}: {gpu.uncorrected_errors} uncorrected memory error(s) since the driver was loaded"
        yield Finding(Level.WARNING, sentence, [gpu.text()], "reset it (nvidia-smi --gpu-reset); if more come, replace")
    if gpu.slowdowns:
        sentence = f"GPU {gpu.index} is slowed down: {', '.join(gpu.slowdowns)}"
        yield Finding(
            Level.WARNING, sentence, [gpu.text()], "look at cooling and power: all ranks wait for the slowest"
        )


def check_peers(blocked: Sequence[tuple[int, int]], count: int) -> Iterator[Finding]:
    """Yield the pairs of a machine's `count` GPUs that cannot read each other's memory, together. Pure."""
    if blocked:
        shown = [f"GPU {one} and GPU {other}" for one, other in blocked[:MOST_PAIRS]]
        sentence = f"{len(blocked)} of {count * (count - 1) // 2} pairs of GPUs cannot read each other's memory"
        advice = "NCCL takes the host's memory between them: look at NVLink, IOMMU and ACS (nvidia-smi topo -p2p r)"
        yield Finding(Level.WARNING, sentence, shown, advice)


def installed_versions(names: Sequence[str]) -> dict[str, str]:
    """Return the versions of those of some packages that are installed, without what stands after a +."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def tested_versions(cuda: bool) -> dict[str, tuple[str, ...]]:
    """Return the versions of the tested set by package; none where the package is not in a checkout.

    CPU machines may have the versions that GPUs get: launch/install.sh --gpu-versions.
    """
    versions: dict[str, tuple[str, ...]] = {}
    for name in ("gpu",) if cuda else ("cpu", "gpu"):
        file = LAUNCH / f"requirements-{name}.txt"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        for package, _, version in (line.partition("==") for line in lines if not line.startswith("#")):
            key = package.lower().replace("_", "-")
            if name == "cpu" or cuda or key in versions:
                versions[key] = (*versions.get(key, ()), version)
    return versions


def check_versions(installed: Mapping[str, str], tested: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Yield the packages that are not of the tested set, together. Pure."""
    differing = {name: version for name, version in installed.items() if version not in tested.get(name, [version])}
    if differing:
        shown = [f"{name} {version}, tested is {' or '.join(tested[name])}" for name, version in differing.items()]
        sentence = f"not of the tested set: {', '.join(f'{name} {version}' for name, version in differing.items())}"
        advice = "install launch/requirements-gpu.txt or -cpu.txt, or run the tests with these versions"
        yield Finding(Level.WARNING, sentence, shown, advice)


def shared_memory_free() -> int:
    """Return the free bytes of the shared memory file system; 0 where there is none."""
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0


def check_shared_memory(free: int, cuda: bool) -> Iterator[Finding]:
    """Yield whether the shared memory file system is too small. Pure."""
    says, advice = (
        f"{SHARED_MEMORY} has {free / 2**20:.0f} MiB free",
        "enlarge it (docker run --shm-size=16g), or empty it",
    )
    if free < LEAST_SHARED_BYTES:
        yield Finding(Level.ERROR, f"{says}: engines and process groups need more to start", (), advice)
    elif cuda and free < ENOUGH_SHARED_BYTES:
        yield Finding(Level.WARNING, f"{says}: NCCL may fail where GPUs do not reach each other", (), advice)


def check_host_memory(free: int, total: int) -> Iterator[Finding]:
    """Yield whether other programs have the host's memory. Pure."""
    if free < MIN_FREE_SHARE * total:
        sentence = f"only {free / 2**30:.1f} of {total / 2**30:.1f} GiB of host memory are free"
        yield Finding(
            Level.WARNING, sentence, (), "stop the programs that use it: the kernel ends ranks without a word"
        )
