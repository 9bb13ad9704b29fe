"""Find CUDA's runtime library, toolkit and ninja if they were installed by pip, where engines do not find them."""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import torch

from grpo_mp.utils.errors import UserError, one_line

SYSTEM_TOOLKIT = Path("/usr/local/cuda")
CACHE = Path("~/.cache/grpo_mp")
CHECK_TIMEOUT_S = 120.0
# Headers of Python for Triton, of CUDA and its C++ library for DeepGEMM, flashinfer and SGLang, which compile C++20.
KERNEL = """
#include <Python.h>
#include <cuda/std/cstdint>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#if CUDART_VERSION / 1000 != CUDA_OF_TORCH
#error "torch is built for another version of CUDA"
#endif
__global__ void kernel() {}
cudaError_t launch() { kernel<<<1, 1>>>(); return cudaGetLastError(); }
"""


def runtime_folder(name: str = "libcudart.so.13") -> Path | None:
    """Return the folder of the CUDA runtime library that pip installed with torch; None if there is none."""
    spec = find_spec("nvidia")
    for root in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(root).glob(f"*/lib/{name}")):
            return file.parent
    return None


def toolkit_folder(environment: Mapping[str, str], system: Path = SYSTEM_TOOLKIT) -> Path | None:
    """Return the CUDA toolkit with which DeepGEMM, flashinfer and SGLang compile kernels; None if there is none.

    The nvcc of the path may be a link or a script outside its toolkit, as /usr/bin/nvcc. Therefore a folder with the
    runtime library goes first.
    """
    if home := environment.get("CUDA_HOME") or environment.get("CUDA_PATH"):
        return Path(home)
    nvcc = shutil.which("nvcc", path=environment.get("PATH", ""))
    folders = [Path(nvcc).parents[1], Path(nvcc).resolve().parents[1]] if nvcc else []
    folders += [system] * system.is_dir()
    return next(filter(_has_runtime, folders), next(iter(folders), None))


def _has_runtime(toolkit: Path) -> bool:
    return any((toolkit / libraries / "libcudart.so").exists() for libraries in ("lib64", "lib"))


def link_toolkit(packages: Path, folder: Path) -> Path:
    """Make `folder` a CUDA toolkit in the layout of NVIDIA's installer, of links to pip's packages; return `folder`.

    `packages`: the folder nvidia/cu13 in site-packages. It has `lib` instead of `lib64`, and no `libcudart.so` without
    a version.
    """
    libraries = folder / "lib64"
    libraries.mkdir(parents=True, exist_ok=True)
    links = {folder / entry.name: entry for entry in packages.iterdir()}
    for library in sorted((packages / "lib").iterdir()):
        links[libraries / library.name] = library
        if ".so." in library.name:
            links.setdefault(libraries / f"{library.name.partition('.so.')[0]}.so", library)
    for link, target in links.items():
        with suppress(FileExistsError):  # of an earlier start, or of another engine that starts now
            link.symlink_to(target)
    return folder


def cuda_environment(environment: Mapping[str, str], system: Path = SYSTEM_TOOLKIT) -> dict[str, str]:
    """Return the environment variables by which an engine finds the CUDA runtime library, a toolkit and ninja."""
    # The commands of an environment that is not activated are on no path.
    variables = {"PATH": _join(environment.get("PATH"), str(Path(sys.executable).parent))}
    folder = runtime_folder()
    if folder:
        # SGLang preloads torch_memory_saver into its schedulers, which does not search pip's folders for libcudart.
        variables["LD_LIBRARY_PATH"] = _join(str(folder), environment.get("LD_LIBRARY_PATH"))
    if environment.get("CUDA_HOME") or environment.get("CUDA_PATH"):
        return variables
    home = toolkit_folder(environment, system)
    if folder and not (home and _has_runtime(home)) and (folder.parent / "bin" / "nvcc").is_file():
        # Compiled kernels are found again by the toolkit's path, so it must not change from start to start.
        name = hashlib.sha256(str(folder.parent).encode()).hexdigest()[:12]
        home = link_toolkit(folder.parent, CACHE.expanduser() / f"cuda_{name}")
    # Without CUDA_HOME, SGLang compiles kernels with the toolkit of the first nvcc on the path.
    return variables | ({"CUDA_HOME": str(home)} if home else {})


def check_engine_libraries(environment: Mapping[str, str]) -> None:
    """Check that an engine's processes can start, and that they can compile kernels."""
    try:
        variables = {**environment, **cuda_environment(environment)}
    except OSError as error:
        raise UserError(f"{CACHE}: links to CUDA's files cannot be made ({one_line(error)}): set HOME") from error
    check_compiler(variables)
    try:
        from torch_memory_saver.utils import get_binary_path_from_package
    except ImportError as error:
        advice = "install the engine as grpo-mp[gpu] does"
        raise UserError(f"torch_memory_saver does not load ({one_line(error, 200)}): {advice}") from error
    check_preload(Path(get_binary_path_from_package("torch_memory_saver_hook_mode_preload")), variables)


def check_compiler(environment: Mapping[str, str], system: Path = SYSTEM_TOOLKIT) -> None:
    """Check that a CUDA source can be compiled and linked, by what an engine's processes find in `environment`."""
    home = toolkit_folder(environment, system)
    version = str(torch.version.cuda).partition(".")[0]
    if home is None:
        raise UserError(
            "no CUDA toolkit was found, and engines compile kernels when they start: install CUDA 13's toolkit and set "
            "CUDA_HOME to its folder, or install the package nvidia-cuda-nvcc"
        )
    if not shutil.which("ninja", path=environment.get("PATH", "")):
        raise UserError("ninja was not found, and engines compile kernels with it: pip install ninja")
    with tempfile.TemporaryDirectory() as scratch:
        source, compiled, library = (str(Path(scratch, f"kernel.{suffix}")) for suffix in ("cu", "o", "so"))
        Path(source).write_text(KERNEL)
        compile_it = [str(home / "bin" / "nvcc"), "-std=c++20", "-Xcompiler", "-fPIC", f"-DCUDA_OF_TORCH={version}"]
        compile_it += [f"-I{sysconfig.get_path('include')}", "-c", source, "-o", compiled]
        link_it = [environment.get("CXX", "c++"), "-shared", compiled, f"-L{home / 'lib64'}", "-lcudart", "-o", library]
        failure = _failure(compile_it, environment) or _failure(link_it, environment)
    if failure:
        raise UserError(
            f"engines cannot compile kernels by the toolkit {home} ({failure}): install the whole toolkit of CUDA "
            f"{version} and set CUDA_HOME to its folder, a C++ compiler (g++ 11 or newer), and Python's headers "
            "(Debian: python3-dev)"
        )


def check_preload(library: Path, environment: Mapping[str, str]) -> None:
    """Check that a process can start with `library` preloaded, as an engine's schedulers do."""
    failure = _failure([sys.executable, "-I", "-S", "-c", ""], {**environment, "LD_PRELOAD": str(library)})
    if failure:
        remedy = "install nvidia-cuda-runtime at the version of requirements-gpu.txt"
        if "libcuda.so" in failure:
            remedy = (
                "the driver's library is missing: start the container with the driver (--gpus all, --nv), or install it"
            )
        raise UserError(f"engines cannot start: a process with LD_PRELOAD={library} fails ({failure}): {remedy}")


def _failure(command: list[str], environment: Mapping[str, str]) -> str:
    """Run a command; return its status and the first line of its errors, or "" on success."""
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return one_line(error)
    lines = ended.stderr.splitlines() or [""]
    first = next((line for line in lines if "error" in line.lower() or "cannot find" in line), lines[0])
    return f"status {ended.returncode}: {one_line(first)}" if ended.returncode else ""


def _join(*paths: str | None) -> str:
    return os.pathsep.join(filter(None, paths))
