"""The import hook: what it rewrites, and when it does nothing; memory and allocator settings."""

import os
import resource
import subprocess
import sys
import types

import pytest
import torch

from grpo_mp import platform
from grpo_mp.platform import fake_cuda, import_hook, prepare
from grpo_mp.platform.import_hook import FAKE_CUDA, _Finder, compile_on_cpu

SOURCE = b"""
import torch
from torch.cuda import Stream
device = torch.cuda.current_device()
moved = x.cuda(non_blocking=True)
pinned = torch.ones(2, device="cuda", pin_memory=True).pin_memory()
on_device = x.is_cuda
kind = "torch.cuda.FloatTensor"
with torch.cuda.stream(Stream()):
    torch.cuda.current_stream().wait_stream(Stream())
"""


def run(code: types.CodeType, **names) -> dict:
    scope = {FAKE_CUDA: fake_cuda, **names}
    exec(code, scope)
    return scope


def test_cuda_calls_become_cpu_calls():
    x = torch.ones(2)
    scope = run(compile_on_cpu(SOURCE, "module.py"), x=x)
    assert scope["device"] == torch.device("cpu")
    assert scope["moved"] is x
    assert scope["pinned"].device.type == "cpu"
    assert scope["on_device"] is True
    assert scope["kind"] == "torch.FloatTensor"


def test_code_is_cached_in_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "m.py").write_text("a = 'cuda'")
    loader = import_hook._Loader("m", str(tmp_path / "m.py"), None)
    assert run(loader.get_code("m"))["a"] == "cpu"
    assert [*tmp_path.rglob("*.pyc")] == [*import_hook.cache_folder().rglob("*.pyc")] != []
    monkeypatch.setattr(import_hook, "compile_on_cpu", None)
    assert run(loader.get_code("m"))["a"] == "cpu"


@pytest.fixture
def finders(monkeypatch):
    path = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    monkeypatch.setattr(sys, "meta_path", path)
    return path


def test_prepare_installs_no_hook_on_cuda(finders, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    original = list(finders)
    prepare()
    assert sys.meta_path == original
    assert platform.backend() == "nccl"
    assert platform.megatron_fields(interleaved=True, model={}) == {"apply_rope_fusion": True}


def test_torch_is_not_changed():
    program = """
import sys, torch, torch._dynamo
import grpo_mp.platform as platform
assert not any(name.startswith("megatron") for name in sys.modules)
owners = (torch, torch.cuda, torch.Tensor, torch.distributed, torch.nn, torch.optim)
originals = [dict(vars(owner)) for owner in owners]
platform.prepare()
import megatron.core.models.gpt.gpt_model, megatron.core.optimizer
for owner, original in zip(owners, originals):
    changed = [name for name, value in original.items() if vars(owner).get(name) is not value]
    assert not changed, (owner, changed)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr


def test_a_variable_of_the_user_stays(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    prepare()
    assert os.environ["NCCL_NVLS_ENABLE"] == "1"
    monkeypatch.delenv("NCCL_NVLS_ENABLE")
    prepare()
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"


@pytest.mark.parametrize(
    ("limits", "expected"), [((1024, 4096), 4096), ((1024, 1 << 30), 65536), ((100000, 1 << 30), 100000)]
)
def test_open_files_are_raised_to_what_the_machine_allows(limits, expected, monkeypatch):
    current = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: current[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: current.append(limits))
    prepare()
    assert current[-1] == (expected, limits[1])


def test_commands_without_ranks_show_no_warning_of_megatron():
    code = (
        "from grpo_mp import platform; platform.prepare()\n"
        "from megatron.core._rank_utils import safe_get_rank; print(safe_get_rank())"
    )
    unranked = {name: value for name, value in os.environ.items() if name not in ("RANK", "SLURM_PROCID")}
    done = subprocess.run([sys.executable, "-c", code], env=unranked, capture_output=True, text=True, check=False)
    assert "Could not determine rank" not in done.stderr
    assert done.returncode == 0 or "No module named 'megatron.core._rank_utils'" in done.stderr
