"""Find CUDA's runtime library and toolkit if they were installed by pip, where no loader or compiler finds them."""

import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

SYSTEM_TOOLKIT = Path("/usr/local/cuda")


def runtime_folder(name: str = "libcudart.so.13") -> Path | None:
    """Return the folder of the CUDA runtime library that pip installed with torch; None if there is none."""
    spec = find_spec("nvidia")
    for root in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(root).glob(f"*/lib/{name}")):
            return file.parent
    return None


def library_path(folder: Path | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return a dictionary with LD_LIBRARY_PATH, `folder` first; {} without a folder.

    SGLang preloads torch_memory_saver into its schedulers. That library needs libcudart, but does not search pip's
    folders for it.
    """
    if folder is None:
        return {}
    return {"LD_LIBRARY_PATH": ":".join(filter(None, (str(folder), environment.get("LD_LIBRARY_PATH"))))}


def find_toolkit(environment: Mapping[str, str], system: Path = SYSTEM_TOOLKIT) -> Path | None:
    """Return the folder of the CUDA toolkit with which DeepGEMM and flashinfer compile kernels; None if there is none.

    The search order is theirs: CUDA_HOME, CUDA_PATH, nvcc on PATH, `system`.
    """
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if environment.get(name):
            return Path(environment[name])
    if nvcc := shutil.which("nvcc", path=environment.get("PATH", "")):
        return Path(nvcc).parents[1]
    return system if system.is_dir() else None


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
    if folder and find_toolkit(environment, system) is None and (folder.parent / "bin" / "nvcc").is_file():
        variables["CUDA_HOME"] = str(link_toolkit(folder.parent, scratch / "cuda_home"))
    return variables
