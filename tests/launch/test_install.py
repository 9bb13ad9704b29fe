"""install.sh with a Python that only records its arguments: which torch it takes, what it skips, how it fails."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.test_requirements import CPU, GPU

INSTALL = Path(__file__).parents[2] / "launch" / "install.sh"
TOOLS = ("bash", "dirname", "sha256sum", "cat", "sed", "grep", "mkdir", "cp", "tee", "tail", "awk")
CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"
PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$NOTES"
case "$*" in
  *version_info*) [ -n "$VERSION" ] && echo "$VERSION" ;;
  *ensurepip*) exit "${NO_VENV:-0}" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip index"*) echo "Available versions: 9.9.9, $OFFERED" ;;
  *"import requires"*) [ -z "$LIBRARIES" ] || echo "$LIBRARIES" ;;
  *requirements-cpu*) echo "no such wheel" && exit "${PIP_STATUS:-0}" ;;
esac
"""
Install = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    file = tmp_path / "notes"
    file.touch()
    return file


@pytest.fixture
def install(tmp_path: Path, notes: Path) -> Install:
    """Run install.sh for the same folder with nothing but TOOLS and that Python on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(str(shutil.which(tool)))
    (folder / "env").symlink_to(str(shutil.which("env")))
    python = folder / "python3.11"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def run(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": str(folder),
            "NOTES": str(notes),
            "OFFERED": "2.13.0",
            "VERSION": "3.11",
            "LIBRARIES": "",
            **variables,
        }
        command = [str(shutil.which("bash")), str(INSTALL), *options, str(tmp_path / "venv")]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    return run


def test_cpu_index_is_used_where_pip_has_only_the_cuda_build(install: Install, notes: Path) -> None:
    assert install().returncode == 0
    lines = [line for line in notes.read_text().splitlines() if CPU_INDEX in line]
    assert len(lines) == 1
    assert lines[0].endswith("torch==2.13.0")


def test_cpu_index_is_not_used_where_pip_has_a_cpu_build(install: Install, notes: Path) -> None:
    assert install(OFFERED="2.13.0+cpu, 2.13.0").returncode == 0
    assert "download.pytorch.org" not in notes.read_text()
    assert "torch==2.13.0" in notes.read_text()


def test_versions_of_gpus_are_installed_on_request(install: Install, notes: Path, tmp_path: Path) -> None:
    assert install("--gpu-versions").returncode == 0
    lock = tmp_path / "venv" / "requirements-gpu-versions.txt"
    assert f"-r {lock}" in notes.read_text()
    assert f"torch=={GPU['torch']}" in notes.read_text()
    pins = dict(line.split("==") for line in lock.read_text().splitlines())
    versions = {canonicalize_name(name): Version(version) for name, version in pins.items()}
    assert {name: versions.pop(name) for name in CPU} == {name: GPU.get(name, CPU[name]) for name in CPU}
    assert versions == {name: GPU[name] for name in versions}
    assert {"six", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"} <= versions.keys()


def test_second_run_installs_nothing(install: Install, notes: Path) -> None:
    install()
    notes.write_text("")
    assert "has the cpu packages already" in install().stdout
    assert notes.read_text() == ""


def test_failed_install_says_why_and_is_repeated(install: Install) -> None:
    result = install(PIP_STATUS="1")
    assert result.returncode == 1
    assert result.stderr.startswith("error: pip did not manage")
    assert "no such wheel" in result.stderr
    assert "installing" in install().stdout


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"VERSION": "3.10"}, "error: no Python 3.11, 3.12 or 3.13 was found"),
        ({"VERSION": "3.14", "PYTHON": "python3.11"}, "error: python3.11 is Python 3.14: set PYTHON to a 3.11, 3.12"),
        ({"NO_VENV": "1"}, "error: python3.11 cannot make environments"),
    ],
)
def test_missing_python_is_named(install: Install, variables: dict[str, str], sentence: str) -> None:
    result = install(**variables)
    assert result.returncode == 1
    assert result.stderr.startswith(sentence)
    assert len(result.stderr.splitlines()) == 1
