"""Run by Python at the start of every process of a CPU engine, which has this folder first on its path.

`torchvision` from PyPI is built for CUDA: beside a CPU torch its import fails because one operator that it
annotates is not there. This defines the operator's name when, and only when, torchvision is imported.
"""

import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SCHEMA = "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _DefineBeforeImport(importlib.abc.MetaPathFinder):
    library: Any = None  # kept: the definition lives as long as this object

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            self.library.define(SCHEMA)
            self.library.define("q" + SCHEMA)
        return None


sys.meta_path.insert(0, _DefineBeforeImport())
