"""CUDA's libraries in an environment that pip made; small libraries stand for CUDA's, the dynamic loader is real."""

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mp.platform.cuda_libraries import check_compiler, check_preload, cuda_environment, runtime_folder
from grpo_mp.utils.errors import UserError

RUNTIME = "libcudart.so.13"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Site-packages as pip fills them: a library to preload, and libcudart in a folder that no loader knows."""
    libraries = tmp_path / "nvidia" / "cu13" / "lib"
    libraries.mkdir(parents=True)
    source = tmp_path / "runtime.c"
    source.write_text("int cudart(void) { return 0; }\n")
    compile_library(source, libraries / RUNTIME, f"-Wl,-soname,{RUNTIME}")
    hook = tmp_path / "hook.c"
    hook.write_text("int cudart(void); int hook(void) { return cudart(); }\n")
    compile_library(hook, tmp_path / "hook.so", str(libraries / RUNTIME), "-Wl,-z,now")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in [name for name in sys.modules if name == "nvidia" or name.startswith("nvidia.")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def compile_library(source: Path, library: Path, *options: str) -> None:
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, *options], check=True, timeout=60)


def test_a_preloaded_library_finds_the_runtime_of_pip(site: Path) -> None:
    assert runtime_folder() == site / "nvidia" / "cu13" / "lib"
    check_preload(site / "hook.so", cuda_environment({}))
    (site / "nvidia" / "cu13" / "lib" / RUNTIME).rename(site / "elsewhere.so")
    with pytest.raises(UserError, match=r"^engines cannot start: .* \(status 127: .*\): install nvidia-cuda-runtime"):
        check_preload(site / "hook.so", cuda_environment({}))
    compile_library(site / "runtime.c", site / "libcuda.so.1", "-Wl,-soname,libcuda.so.1")
    compile_library(site / "hook.c", site / "hook.so", str(site / "libcuda.so.1"), "-Wl,-z,now")
    (site / "libcuda.so.1").unlink()
    with pytest.raises(UserError, match=r"libcuda.so.1.*: start the container with the driver \(--gpus all, --nv\)"):
        check_preload(site / "hook.so", cuda_environment({}))


def test_the_users_paths_come_with_those_of_pip(site: Path) -> None:
    own = {"LD_LIBRARY_PATH": "/opt/lib", "CUDA_HOME": "/opt/cuda", "PATH": "/bin"}
    paths = {"LD_LIBRARY_PATH": f"{site}/nvidia/cu13/lib:/opt/lib", "PATH": f"/bin:{Path(sys.executable).parent}"}
    assert cuda_environment(own) == paths


def make_executable(file: Path, text: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def test_a_toolkit_is_made_of_links_where_pip_brought_the_compiler(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path stays the same, by which kernels that were compiled at an earlier start are found again."""
    packages = site / "nvidia" / "cu13"
    no_system = site / "no_such_folder"
    monkeypatch.setenv("HOME", str(site / "home"))
    with pytest.raises(UserError, match=r"^no CUDA toolkit was found, .* or install the package nvidia-cuda-nvcc$"):
        check_compiler(cuda_environment({}, no_system), no_system)
    make_executable(packages / "bin" / "nvcc", "true")
    (packages / "include").mkdir()
    homes = {cuda_environment({}, no_system)["CUDA_HOME"] for _ in range(2)}
    (home,) = map(Path, homes)
    assert home.is_relative_to(site / "home")
    assert (home / "bin" / "nvcc").is_file()
    assert (home / "include").is_dir()
    assert (home / "lib64" / "libcudart.so").resolve() == packages / "lib" / RUNTIME


def test_a_script_that_runs_the_compiler_does_not_hide_the_toolkit(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A toolkit with the runtime library is taken: the system's, or that of pip's packages."""
    monkeypatch.setenv("HOME", str(site / "home"))
    system = site / "cuda-13.0"
    scripts = {"PATH": str(site / "local" / "bin")}
    (site / "local").mkdir()
    make_executable(site / "local" / "bin" / "nvcc", f"exec {system}/bin/nvcc")
    assert cuda_environment(scripts, system)["CUDA_HOME"] == str(site / "local")  # there is no other
    make_executable(site / "nvidia" / "cu13" / "bin" / "nvcc", "true")
    assert Path(cuda_environment(scripts, system)["CUDA_HOME"]).is_relative_to(site / "home")
    (system / "lib64").mkdir(parents=True)
    (system / "lib64" / "libcudart.so").touch()
    assert cuda_environment(scripts, system)["CUDA_HOME"] == str(system)
    make_executable(system / "bin" / "nvcc", "true")
    (site / "local" / "bin" / "nvcc").unlink()
    (site / "local" / "bin" / "nvcc").symlink_to(system / "bin" / "nvcc")
    assert cuda_environment(scripts, site / "no_such_folder")["CUDA_HOME"] == str(system)


def test_a_compiler_that_fails_is_refused_with_its_first_error(tmp_path: Path) -> None:
    environment = {"CUDA_HOME": str(tmp_path), "PATH": str(tmp_path / "bin")}
    with pytest.raises(UserError, match=r"^ninja was not found"):
        check_compiler(environment)
    make_executable(tmp_path / "bin" / "ninja", "true")
    with pytest.raises(UserError, match=r"^engines cannot compile kernels by the toolkit .*No such file"):
        check_compiler(environment)
    make_executable(tmp_path / "bin" / "nvcc", "echo 'kernel.cu(2): fatal error: Python.h: No such file' >&2; exit 1")
    with pytest.raises(UserError, match=r"\(status 1: kernel.cu\(2\): fatal error: Python.h: No such file\): install"):
        check_compiler(environment)
    make_executable(tmp_path / "bin" / "nvcc", "true")
    make_executable(tmp_path / "bin" / "c++", "echo cannot find -lcudart >&2; exit 1")
    with pytest.raises(UserError, match=r"\(status 1: cannot find -lcudart\)"):
        check_compiler(environment)
    make_executable(tmp_path / "bin" / "c++", "true")
    check_compiler(environment)
