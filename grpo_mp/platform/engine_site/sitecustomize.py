"""Stand-ins for packages that SGLang imports, but a text model on a CPU does not need.

Python runs this file at the start of every process of a CPU engine, which has this folder first on its path.
`sgl_kernel` has no wheel for CPUs, `torchvision` from PyPI is built for CUDA, and `IPython` is for notebooks. So the
CPU requirements leave them out. Any name can be imported from a stand-in, but none can be called. SGLang looks up its
kernels in `torch.ops.sgl_kernel`, which stays empty, so it uses its torch implementations.
"""

import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

STAND_INS = ("sgl_kernel", "torchvision", "IPython")


class _Missing:
    """Stub that raises NotImplementedError when called."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} is not there: this engine runs text models on the CPU")

    def __getattr__(self, name: str) -> "_Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in STAND_INS:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        vars(module).update(__version__="0.0.0", __getattr__=_Missing(spec.name).__getattr__)
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _StandIns())
