"""Checks of a machine: GPUs, packages, versions, memory.

`check_device` raises UserError if a job cannot start on this machine; `quick_findings` returns warnings and errors.
They are used by `grpo-mp doctor machine`, at the start of a job, and by the node check of Slurm jobs.
"""

import importlib.metadata
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

import psutil
import torch

from grpo_mp import platform
from grpo_mp.platform.cuda_libraries import check_engine_libraries
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.findings import Finding, Level

SHARED_MEMORY = Path("/dev/shm")
LAUNCH = Path(__file__).parents[2] / "launch"  # exists in a checkout only
CORE = ("torch", "megatron-core", "sglang", "transformers", "transformer-engine")  # packages whose versions are checked
# Engines store their load statistics in shared memory, NCCL the buffers between GPUs without peer-to-peer access.
LEAST_SHARED_BYTES, ENOUGH_SHARED_BYTES = 2**24, 2**30
MIN_FREE_SHARE = 0.1  # of host memory
MAX_USED_SHARE = 0.2  # of GPU memory at the start; a CUDA context or a display uses less
CHOOSE_OTHER = "choose other GPUs (CUDA_VISIBLE_DEVICES)"
DRIVER = Path("/proc/driver/nvidia/version")
REQUIRED = {  # module that must load on a GPU machine -> advice if it does not
    "transformer_engine.pytorch": "build transformer-engine against this torch, as the README says",
    "torch_memory_saver": "install the engine as grpo-mp[gpu] does",
}
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def quick_findings() -> list[Finding]:
    """Return findings about this node's package versions and memory. A job does not start if one is an error."""
    memory = psutil.virtual_memory()
    return [
        *check_versions(installed_versions(CORE), tested_versions(platform.on_cuda())),
        *check_shared_memory(shared_memory_free(), platform.on_cuda()),
        *check_host_memory(memory.available, memory.total),
    ]


def installed_versions(names: Sequence[str]) -> dict[str, str]:
    """Return the versions of those packages in `names` that are installed, without local parts such as +cu128."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def tested_versions(cuda: bool) -> dict[str, tuple[str, ...]]:
    """Return package -> tested versions, from the lock files in launch/; {} outside of a checkout.

    On a CPU machine the GPU versions count as tested, too, because `launch/install.sh --gpu-versions` installs them.
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
    """Yield one finding about all installed packages whose version is not a tested one."""
    differing = {name: version for name, version in installed.items() if version not in tested.get(name, [version])}
    if differing:
        shown = [f"{name} {version}, tested is {' or '.join(tested[name])}" for name, version in differing.items()]
        sentence = f"not of the tested set: {', '.join(f'{name} {version}' for name, version in differing.items())}"
        advice = "install launch/requirements-gpu.txt or -cpu.txt, or run the tests with these versions"
        yield Finding(Level.WARNING, sentence, shown, advice)


def shared_memory_free() -> int:
    """Return the free bytes in /dev/shm; 0 if it does not exist."""
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0


def check_shared_memory(free: int, cuda: bool) -> Iterator[Finding]:
    """Yield a finding if /dev/shm has too little free memory. `free`: in bytes."""
    sentence = f"{SHARED_MEMORY} has {free / 2**20:.0f} MiB free"
    advice = "enlarge it (docker run --shm-size=16g), or empty it"
    if free < LEAST_SHARED_BYTES:
        yield Finding(Level.ERROR, f"{sentence}: engines and process groups need more to start", (), advice)
    elif cuda and free < ENOUGH_SHARED_BYTES:
        yield Finding(Level.WARNING, f"{sentence}: NCCL may fail where GPUs do not reach each other", (), advice)


def check_host_memory(free: int, total: int) -> Iterator[Finding]:
    """Yield a finding if most of the host's memory is in use. `free`, `total`: in bytes."""
    if free < MIN_FREE_SHARE * total:
        sentence = f"only {free / 2**30:.1f} of {total / 2**30:.1f} GiB of host memory are free"
        advice = "stop the programs that use it: the kernel ends ranks without a word"
        yield Finding(Level.WARNING, sentence, (), advice)


def check_device(local_rank: int) -> None:
    """Check that this rank has a working GPU that no other process uses.

    Without CUDA, check that the machine has no GPUs that torch cannot use.
    """
    if not platform.on_cuda():
        check_no_unusable_gpu(os.environ, DRIVER)
        return
    check_requirements(os.environ, import_module)
    check_engine_libraries(os.environ)
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"the {local_rank + 1} ranks of this node need a GPU each, torch sees {count}: start fewer ranks, or let "
            "every rank see all of the node's GPUs (CUDA_VISIBLE_DEVICES)"
        )
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info(local_rank)
    except RuntimeError as error:
        raise UserError(f"GPU {local_rank} cannot be used ({error}): reset it, or {CHOOSE_OTHER}") from error
    check_free(local_rank, free_bytes, total_bytes)


def check_no_unusable_gpu(environment: Mapping[str, str], driver: Path) -> None:
    """Refuse a machine with GPUs that torch cannot use, unless CUDA_VISIBLE_DEVICES hides them.

    `driver`: file that exists if an NVIDIA driver is loaded.
    """
    if not driver.exists() or environment.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1"):
        return
    reason = f"CUDA {torch.version.cuda} and the driver do not fit" if torch.version.cuda else "it is built for CPUs"
    raise UserError(
        f"this machine has NVIDIA GPUs, but torch {torch.__version__} cannot use them ({reason}): install another "
        "torch or driver, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
    )


def check_requirements(environment: Mapping[str, str], load: Callable[[str], object]) -> None:
    """Check that the required modules load, and that no variable prevents sharing or releasing GPU memory.

    `load`: imports a module by name.
    """
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in environment.get(name, "").lower():
            raise UserError(f"{name}: expandable segments cannot be shared with an engine: remove them")
    if environment.get("TORCH_DIST_USE_NCCL2") == "1":
        raise UserError("TORCH_DIST_USE_NCCL2=1: its process groups cannot release memory between phases: unset it")
    for module, advice in REQUIRED.items():
        try:
            load(module)
        except (ImportError, OSError, RuntimeError) as error:
            raise UserError(f"{module} does not load ({one_line(error, 200)}): {advice}") from error


def check_free(device: int, free_bytes: int, total_bytes: int) -> None:
    """Refuse a GPU if other processes use more than MAX_USED_SHARE of its memory."""
    used_bytes = total_bytes - free_bytes
    if used_bytes > MAX_USED_SHARE * total_bytes:
        raise UserError(
            f"GPU {device}: {used_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB are in use by another process: "
            f"stop it, or {CHOOSE_OTHER}"
        )
