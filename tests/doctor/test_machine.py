"""Whether a machine is fit: this one, and one with GPUs of which only the driver's and torch's answers are made up."""

import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grpo_mp import platform
from grpo_mp.cli.main import main
from grpo_mp.doctor import machine
from grpo_mp.utils.findings import Finding, Level

GIB = 2**30


def levels(findings: list[Finding]) -> dict[str, Level]:
    return {finding.sentence: finding.level for finding in findings}


@pytest.mark.slow
@pytest.mark.skipif(platform.on_cuda(), reason="there is a GPU")
def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks of its CPU really exchange tensors; what cannot be looked at is named."""
    assert main(["doctor", "machine"]) == 0
    said = capsys.readouterr().out
    assert "no GPU that torch can use: runs here compute on the CPU" in said
    assert "ok: torch 2" in said
    assert "ok: gloo between 2 ranks: " in said


Gpus = Callable[..., None]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Two GPUs."""

    def make(*names: str, slow: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=0: (79 * GIB, 80 * GIB))
        monkeypatch.setattr(machine, "matrix_tflops", [700.0, 600.0 if slow else 680.0].__getitem__)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index] if names else "NVIDIA H100")

    return make


def test_gpus_in_good_order(gpus: Gpus) -> None:
    gpus()
    (found,) = machine.check_devices(2)
    assert (found.sentence, found.level) == ("2 GPUs", Level.OK)
    assert found.evidence[1] == "GPU 0: NVIDIA H100, 700 TFLOP/s"


def test_a_slow_gpu_is_named(gpus: Gpus) -> None:
    gpus(slow=True)
    slow, _ = machine.check_devices(2)
    assert (slow.level, slow.sentence) == (
        Level.WARNING,
        "GPU 1 multiplies matrices at 600 TFLOP/s, the fastest at 700",
    )


def test_a_gpu_that_another_process_uses_is_an_error(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=0: ((79 - 60 * device) * GIB, 80 * GIB))
    (error,) = [each for each in machine.check_devices(2) if each.level is Level.ERROR]
    assert error.sentence.startswith("GPU 1: 61.0 of 80.0 GiB are in use by another process")


def test_infiniband_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (none,) = machine.check_network(tmp_path)
    assert (none.level, none.sentence.partition(":")[0]) == (Level.OK, "no InfiniBand port is active")
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        (tmp_path / device / "ports" / "1").mkdir(parents=True)
        (tmp_path / device / "ports" / "1" / "state").write_text(state)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * 2**20, 8 * 2**20))
    found = levels([*machine.check_network(tmp_path)])
    assert found["active InfiniBand ports: mlx5_0/1"] == Level.OK
    assert found["8192 KiB of memory may be locked: NCCL cannot register buffers for InfiniBand"] == Level.WARNING


def test_compiled_kernels_need_a_folder_that_can_be_written(tmp_path: Path) -> None:
    assert not [*machine.check_caches(tmp_path / "new" / "cache")]
    (tmp_path / "file").touch()
    (error,) = machine.check_caches(tmp_path / "file")
    assert (error.level, error.sentence.partition(" in ")[0]) == (Level.ERROR, "engines cannot keep compiled kernels")


def fail(rank: int, scratch: str, ranks: int) -> None:
    raise RuntimeError("no route")


def hang(rank: int, scratch: str, ranks: int) -> None:
    time.sleep(60)


def test_ranks_that_exchange_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "exchange", fail)
    (failed,) = machine.check_exchange(2)
    assert (failed.level, failed.sentence.endswith("cannot exchange tensors: RuntimeError: no route")) == (
        Level.ERROR,
        True,
    )
    monkeypatch.setattr(machine, "EXCHANGE_LIMIT_S", 0.5)
    monkeypatch.setattr(machine, "exchange", hang)
    (hanging,) = machine.check_exchange(2)
    assert hanging.sentence == "2 ranks of this machine exchange nothing within 0.5 s"


def test_packages_that_are_there_and_do_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own: one raises, one ends without a word."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    (tmp_path / "amp_C.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    # As extensions of torch, which find its libraries once it is there.
    needs_torch = "import sys\nif 'torch' not in sys.modules: raise ImportError('libc10.so: cannot open')"
    (tmp_path / "deep_ep.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    (tmp_path / "flash_attn.py").write_text(needs_torch)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(
        machine, "KERNELS", {"amp_C": "rebuild", "deep_ep": "rebuild", "flash_attn": "rebuild", "deep_gemm": ""}
    )
    found = levels([*machine.check_kernels()])
    assert found == {
        "apex is installed and does not load: ImportError: undefined symbol: _ZN3c10": Level.WARNING,
        "deep_ep is installed and does not load: the process ended with status -11": Level.WARNING,
        "packages with kernels that load: flash_attn": Level.OK,
        "not installed: deep_gemm": Level.OK,
    }
    assert machine.import_failure("json") == ""
