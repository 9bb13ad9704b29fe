"""The import hook: what it rewrites, what it leaves alone, and where it stays out."""

import marshal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from grpo_mp import platform
from grpo_mp.platform import fake_cuda as cuda_stand_ins
from grpo_mp.platform import prepare
from grpo_mp.platform.import_hook import NAME, _Finder, cache_folder, cached_code, compile_on_cpu

SOURCE = b"""
import torch
from torch.cuda import Stream
here = torch.cuda.current_device()
moved = x.cuda(non_blocking=True)
pinned = torch.ones(2, device="cuda", pin_memory=True).pin_memory()
on_device = x.is_cuda
kind = "torch.cuda.FloatTensor"
with torch.cuda.stream(Stream()):
    torch.cuda.current_stream().wait_stream(Stream())
"""


def run(code: types.CodeType, **names) -> dict:
    scope = {NAME: cuda_stand_ins, **names}
    exec(code, scope)
    return scope


def test_calls_become_cpu_calls():
    x = torch.ones(2)
    scope = run(compile_on_cpu(SOURCE, "module.py"), x=x)
    assert scope["here"] == torch.device("cpu")
    assert scope["moved"] is x
    assert scope["pinned"].device.type == "cpu"
    assert scope["on_device"] is True
    assert scope["kind"] == "torch.FloatTensor"


def test_meta_tensors_stay_meta():
    assert cuda_stand_ins.to_cpu(torch.ones(2, device="meta")).is_meta


def test_code_is_kept_and_a_torn_file_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(cached_code(b"a = 'cuda'", "m.py"))["a"] == "cpu"
    (file,) = cache_folder().iterdir()
    file.write_bytes(marshal.dumps(compile("a = 'kept'", "m.py", "exec")))
    assert run(cached_code(b"a = 'cuda'", "m.py"))["a"] == "kept"
    file.write_bytes(file.read_bytes()[:10])
    assert run(cached_code(b"a = 'cuda'", "m.py"))["a"] == "cpu"
    assert run(cached_code(b"a = 'other'", "m.py"))["a"] == "other"


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert run(cached_code(b"a = 'cuda'", "m.py"))["a"] == "cpu"


@pytest.fixture
def finders(monkeypatch):
    """sys.meta_path without the hook, as in a fresh process."""
    path = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    monkeypatch.setattr(sys, "meta_path", path)
    return path


def test_inert_where_cuda_is(finders, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = list(finders)
    prepare()
    assert sys.meta_path == before
    assert platform.backend() == "nccl"
    assert platform.megatron_fields(interleaved=True, model={}) == {"apply_rope_fusion": True}


def test_pinned_memory_is_of_its_size_where_cuda_is(finders, monkeypatch):
    said = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    prepare()
    assert said == ["max_split_size_mb:64,pinned_max_cached_size_mb:1"]
    assert platform.allocator_settings({}) == "pinned_max_cached_size_mb:1"
    own = {"PYTORCH_ALLOC_CONF": "pinned_max_cached_size_mb:512", "PYTORCH_CUDA_ALLOC_CONF": "a:1"}
    assert platform.allocator_settings(own) == "pinned_max_cached_size_mb:512"


def test_torch_knows_the_setting_of_pinned_memory():
    header = Path(torch.__file__).parent / "include" / "ATen" / "core" / "CachingHostAllocator.h"
    assert platform.PINNED.removesuffix("_mb") + "()" in header.read_text()
    torch._C._accelerator_setAllocatorSettings(platform.allocator_settings({}))


def test_a_cpu_has_host_memory_only():
    assert platform.device() == torch.device("cpu")
    assert platform.backend() == "gloo"
    platform.synchronize()
    platform.free_device_memory()
    assert platform.device_bytes() == platform.peak_device_bytes() == 0
    assert 0 < platform.host_bytes() <= platform.peak_host_bytes() + 2**20
    assert platform.free_device_bytes() > 0


def test_too_late_is_an_error(finders, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    with pytest.raises(RuntimeError, match=r"before grpo_mp\.platform\.prepare"):
        prepare()


def test_again_is_harmless(finders, monkeypatch):
    for name in [n for n in sys.modules if n.startswith("megatron.")]:
        monkeypatch.delitem(sys.modules, name)
    prepare()
    prepare()
    assert sum(isinstance(finder, _Finder) for finder in sys.meta_path) == 1


def test_torch_is_left_alone():
    program = """
import sys, torch, torch._dynamo
import grpo_mp.platform as platform
assert not any(name.startswith("megatron") for name in sys.modules)
places = (torch, torch.cuda, torch.Tensor, torch.distributed, torch.nn, torch.optim)
before = [dict(vars(place)) for place in places]
platform.prepare()
import megatron.core.models.gpt.gpt_model, megatron.core.optimizer
for place, old in zip(places, before):
    changed = [name for name, value in old.items() if vars(place).get(name) is not value]
    assert not changed, (place, changed)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
