"""Find CUDA's runtime library and toolkit if they were installed by pip, where no loader or compiler finds them."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from grpo_mp.utils.errors import UserError, one_line

SYSTEM_TOOLKIT = Path("/usr/local/cuda")
CHECK_TIMEOUT_S = 120.0


def runtime_folder(name: str = "libcudart.so.13") -> Path | None:
    """Return the folder of the CUDA runtime library that pip installed with torch; None if there is none."""
    spec = find_spec("nvidia")
    for root in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(root).glob(f"*/lib/{name}")):
            return file.parent
    return None


def library_path(folder: Path | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return a dictionary with LD_LIBRARY_PATH, `folder` first; {} without a folder."""
    # SGLang preloads torch_memory_saver into its schedulers, which does not search pip's folders for libcudart.
    if folder is None:
        return {}
    return {"LD_LIBRARY_PATH": ":".join(filter(None, (str(folder), environment.get("LD_LIBRARY_PATH"))))}


def has_toolkit(environment: Mapping[str, str], system: Path = SYSTEM_TOOLKIT) -> bool:
    """Return whether DeepGEMM and flashinfer find a CUDA toolkit, with which they compile kernels."""
    names = ("CUDA_HOME", "CUDA_PATH")
    on_path = shutil.which("nvcc", path=environment.get("PATH", ""))
    return any(environment.get(name) for name in names) or on_path is not None or system.is_dir()


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
        if not link.is_symlink():
            link.symlink_to(target)
    return folder


def cuda_environment(environment: Mapping[str, str], scratch: Path, system: Path = SYSTEM_TOOLKIT) -> dict[str, str]:
    """Return the environment variables by which an engine finds the CUDA runtime library and a toolkit.

    `scratch`: folder for `link_toolkit`.
    """
    folder = runtime_folder()
    variables = library_path(folder, environment)
    if folder and not has_toolkit(environment, system) and (folder.parent / "bin" / "nvcc").is_file():
        variables["CUDA_HOME"] = str(link_toolkit(folder.parent, scratch / "cuda_home"))
    return variables


def check_engine_libraries(environment: Mapping[str, str]) -> None:
    """Check that an engine's processes can start, and that they find a CUDA toolkit."""
    try:
        from torch_memory_saver.utils import get_binary_path_from_package
    except ImportError as error:
        advice = "install the engine as grpo-mp[gpu] does"
        raise UserError(f"torch_memory_saver does not load ({one_line(error, 200)}): {advice}") from error
    check_toolkit(environment)
    check_preload(Path(get_binary_path_from_package("torch_memory_saver_hook_mode_preload")), environment)


def check_toolkit(environment: Mapping[str, str], system: Path = SYSTEM_TOOLKIT) -> None:
    """Check that engines find a CUDA toolkit with which they can compile kernels."""
    folder = runtime_folder()
    from_pip = folder is not None and (folder.parent / "bin" / "nvcc").is_file()
    if not has_toolkit(environment, system) and not from_pip:
        raise UserError(
            "no CUDA toolkit was found, and engines compile kernels when they start: install CUDA 13's toolkit and set "
            "CUDA_HOME to its folder, or install the package nvidia-cuda-nvcc"
        )


def check_preload(library: Path, environment: Mapping[str, str]) -> None:
    """Check that a process can start with `library` preloaded, as an engine's schedulers do."""
    variables = {**environment, **library_path(runtime_folder(), environment), "LD_PRELOAD": str(library)}
    command = [sys.executable, "-I", "-S", "-c", ""]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S)
    if ended.returncode:
        raise UserError(
            f"engines cannot start: a process with LD_PRELOAD={library} ends with status {ended.returncode} "
            f"({one_line(ended.stderr, 300)}): install nvidia-cuda-runtime at the version of requirements-gpu.txt"
        )
