"""TransformerEngine's own Python code on a machine without CUDA: only what is compiled is replaced.

Its modules are read with their CUDA calls turned into CPU ones, as Megatron's are; a kernel that is called raises.
"""

import os
import sys
from enum import IntEnum
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from grpo_mp.platform import fake_cuda as cuda_stand_ins
from grpo_mp.platform import import_hook as cuda_calls

DTYPES = ("kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1")
BACKENDS = ("NVTE_No_Backend", "NVTE_F16_arbitrary_seqlen", "NVTE_FP8")


class _Numbers(type):
    """A compiled enumeration: every name is a number of its own."""

    numbers = count()

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, next(_Numbers.numbers))
        return int(getattr(cls, name))


class _Compiled(ModuleType):
    """A compiled module: names in capitals are enumerations, all others kernels."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Numbers(name, (), {}) if name[0].isupper() else _kernel(name))
        return getattr(self, name)


def _kernel(name: str) -> Any:
    def kernel(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{name} runs on a GPU only")

    return kernel


def load_python_parts(folder: Path) -> None:
    """Make `transformer_engine` importable from a folder that holds the Python wheel; Megatron then finds it.

    Call it before Megatron is imported.
    """
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # it then looks for no shared objects
    sys.path.insert(0, str(folder))
    compiled = _Compiled("transformer_engine_torch")
    compiled.DType = IntEnum("DType", DTYPES, start=0)
    compiled.NVTE_Fused_Attn_Backend = IntEnum("NVTE_Fused_Attn_Backend", BACKENDS, start=-1)
    sys.modules["transformer_engine_torch"] = compiled
    export = "transformer_engine.pytorch.onnx_extensions"  # wants onnxscript
    sys.modules[export] = _Compiled(export)
    patches = {"transformer_engine.common": _no_extension, "transformer_engine.pytorch.utils": _devices}
    cuda_calls.install_import_hook(patches, ("megatron", "transformer_engine"))


def _no_extension(common: Any) -> None:
    common.load_framework_extension = lambda *_: None


def _devices(utils: Any) -> None:
    utils.canonicalize_device = lambda device: torch.device(device or cuda_stand_ins.current_device())
