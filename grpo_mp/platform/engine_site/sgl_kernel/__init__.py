"""Stand-in for SGLang's compiled kernels, which have no wheel for a plain CPU.

Every name can be imported, none can be called. SGLang takes its torch code instead: it asks
`torch.ops.sgl_kernel` what is there, and that stays empty.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.0.0"


class _Missing:
    """A kernel that is not here: importable, and an error that names it when it is called."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{self.__name__} is a CUDA kernel: this engine runs on the CPU")

    def __getattr__(self, name: str) -> "_Missing":
        return _missing(f"{self.__name__}.{name}")


def _missing(name: str) -> _Missing:
    if name.rpartition(".")[2].startswith("__"):
        raise AttributeError(name)
    return _Missing(name)


class _AnySubmodule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = _missing  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


__getattr__ = _missing
sys.meta_path.append(_AnySubmodule())
