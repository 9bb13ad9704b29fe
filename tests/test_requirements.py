"""The locked sets, the declared dependencies and the environment that the tests run in are one."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def read_lock(name: str) -> dict[str, Version]:
    """Canonical package name to its only version. Fails on a line that does not pin one."""
    lines = (ROOT / "launch" / f"requirements-{name}.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(package): Version(version) for package, version in pins}


CPU, TEST, GPU, TE_SOURCE = (read_lock(name) for name in ("cpu", "test", "gpu", "te-source"))


def test_no_package_is_locked_twice() -> None:
    assert not CPU.keys() & TEST.keys()


@pytest.mark.parametrize("declared", PROJECT["dependencies"] + EXTRAS["engine"] + EXTRAS["test"])
def test_a_declared_dependency_is_locked_at_an_allowed_version(declared: str) -> None:
    requirement = Requirement(declared)
    assert requirement.specifier.contains((CPU | TEST)[canonicalize_name(requirement.name)])


@pytest.mark.parametrize("declared", PROJECT["dependencies"] + EXTRAS["gpu"])
def test_the_gpu_set_is_locked_too(declared: str) -> None:
    requirement = Requirement(declared)
    assert requirement.specifier.contains(GPU[canonicalize_name(requirement.name)])


@pytest.mark.parametrize("package", CPU)
def test_an_installed_package_is_the_locked_one(package: str) -> None:
    installed = Version(importlib.metadata.version(package)).public
    assert installed in {str(CPU[package]), str(GPU.get(package))}  # the second by install.sh --gpu-versions


@pytest.mark.parametrize("package", TE_SOURCE)
def test_te_source_is_what_a_gpu_runs(package: str) -> None:
    assert TE_SOURCE[package] == GPU[package]


@pytest.mark.parametrize("package", ["nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl"])
def test_the_compiler_is_of_the_release_of_cudas_headers(package: str) -> None:
    """CUDA's C++ library refuses to compile otherwise."""
    assert GPU[package].release[:2] == GPU["nvidia-cuda-runtime"].release[:2]
