"""TransformerEngine's Python code on a machine without CUDA, with stubs for its compiled modules.

Its modules are loaded with their CUDA calls replaced by CPU ones, like Megatron's; calling a kernel raises.
"""

import json
import os
import subprocess
import sys
from enum import IntEnum
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from grpo_mp.platform import fake_cuda, import_hook

DTYPES = ("kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1")
BACKENDS = ("NVTE_No_Backend", "NVTE_F16_arbitrary_seqlen", "NVTE_FP8")
STUBBED = (
    "transformer_engine.pytorch.onnx_extensions",  # requires onnxscript
    *("fla.modules.l2norm", "fla.modules.convolution", "fla.ops.gated_delta_rule"),  # flash-linear-attention
)


class _Enum(type):
    """Stub of a compiled enumeration: every name gets a unique number."""

    numbers = count()

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, next(_Enum.numbers))
        return int(getattr(cls, name))


class _CompiledModule(ModuleType):
    """Stub of a compiled module: capitalized names are enumerations, all others kernels."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Enum(name, (), {}) if name[0].isupper() else _kernel(name))
        return getattr(self, name)


def _kernel(name: str) -> Any:
    def kernel(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{name} runs on a GPU only")

    return kernel


def install_te_stub(folder: Path) -> ModuleType:
    """Make `transformer_engine` importable, also for Megatron, from the folder of its Python wheel.

    Call it before Megatron is imported. Returns the stub of the compiled module.
    """
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # then it does not look for shared objects
    sys.path.insert(0, str(folder))
    module = _CompiledModule("transformer_engine_torch")
    module.DType = IntEnum("DType", DTYPES, start=0)
    module.NVTE_Fused_Attn_Backend = IntEnum("NVTE_Fused_Attn_Backend", BACKENDS, start=-1)
    sys.modules["transformer_engine_torch"] = module
    for name in STUBBED:
        sys.modules[name] = _CompiledModule(name)
    patches = {"transformer_engine.common": _skip_extension, "transformer_engine.pytorch.utils": _patch_devices}
    # Packages that import Megatron have installed the trainer's hook already, which leaves TransformerEngine as it is.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, import_hook._Finder)]
    sys.meta_path.insert(0, import_hook._Finder(patches, ("megatron", "transformer_engine")))
    return module


def _skip_extension(common: Any) -> None:
    common.load_framework_extension = lambda *_: None


def _patch_devices(utils: Any) -> None:
    utils.canonicalize_device = lambda device: torch.device(device or fake_cuda.current_device())


def te_wheel() -> Path:
    """Return the folder of TransformerEngine's Python wheel: in the tests' environment, but not on its path.

    If it could be imported, Megatron would try to use it.
    """
    folder = Path(os.environ.get("TE_SOURCE") or Path(sys.prefix) / "te-source")
    assert (folder / "transformer_engine").is_dir(), f"{folder}: no transformer_engine: bash launch/install.sh --test"
    return folder


def last_json_line(process: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert process.returncode == 0, process.stderr[-3000:]
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result
