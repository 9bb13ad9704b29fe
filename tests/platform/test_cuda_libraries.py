"""CUDA's libraries in an environment that pip made; small libraries stand for CUDA's, the dynamic loader is real."""

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mp.platform.cuda_libraries import check_preload, check_toolkit, cuda_environment, runtime_folder
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
    check_preload(site / "hook.so", {})
    (site / "nvidia" / "cu13" / "lib" / RUNTIME).rename(site / "elsewhere.so")
    with pytest.raises(UserError, match=r"^engines cannot start: .* ends with status 127 .*: install nvidia-cuda"):
        check_preload(site / "hook.so", {})


def test_the_users_library_path_stays_behind(site: Path) -> None:
    variables = cuda_environment({"LD_LIBRARY_PATH": "/opt/lib", "CUDA_HOME": "/opt/cuda"}, site / "scratch")
    assert variables == {"LD_LIBRARY_PATH": f"{site}/nvidia/cu13/lib:/opt/lib"}


def test_a_toolkit_is_made_of_links_where_pip_brought_the_compiler(site: Path) -> None:
    packages = site / "nvidia" / "cu13"
    no_system = site / "no_such_folder"
    with pytest.raises(UserError, match=r"^no CUDA toolkit was found, .* or install the package nvidia-cuda-nvcc$"):
        check_toolkit({}, no_system)
    (packages / "bin").mkdir()
    (packages / "bin" / "nvcc").write_text("")
    (packages / "include").mkdir()
    check_toolkit({}, no_system)
    for _ in range(2):  # an engine that starts again finds the links
        home = Path(cuda_environment({}, site / "scratch", no_system)["CUDA_HOME"])
    assert (home / "bin" / "nvcc").is_file()
    assert (home / "include").is_dir()
    assert (home / "lib64" / "libcudart.so").resolve() == packages / "lib" / RUNTIME
