"""Import hook that loads megatron.* modules with CUDA calls replaced by CPU calls. torch is not changed.

The hook rewrites the syntax tree of each module as it is imported:

| in the source                 | becomes                            |
|-------------------------------|------------------------------------|
| `torch.cuda.X`                | `_cuda_on_cpu.X` (fake_cuda)       |
| `"cuda"`, `"cuda:0"`          | `"cpu"`                            |
| `"torch.cuda.FloatTensor"`    | `"torch.FloatTensor"`              |
| `x.cuda()`, `x.pin_memory()`  | `_cuda_on_cpu.to_cpu(x)`           |
| `pin_memory=...`              | `pin_memory=False`                 |
| `x.is_cuda`                   | `x.is_cpu`                         |

Parsing all of Megatron takes over a second, so the compiled modules are cached in the user's cache folder.
"""

import ast
import hashlib
import importlib.abc
import importlib.machinery
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from grpo_mp.platform import fake_cuda

PACKAGE = "megatron"
FAKE_CUDA = "_cuda_on_cpu"  # name of the module fake_cuda in rewritten modules

Patch = Callable[[Any], None]


class _CudaToCpu(ast.NodeTransformer):
    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(FAKE_CUDA, node.ctx), node)
        if node.attr == "is_cuda":
            node.attr = "is_cpu"
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("cuda", "pin_memory"):
            to_cpu = ast.Attribute(ast.Name(FAKE_CUDA, ast.Load()), "to_cpu", ast.Load())
            call = ast.Call(to_cpu, [node.func.value, *node.args], node.keywords)
            return ast.fix_missing_locations(ast.copy_location(call, node))
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        self.generic_visit(node)
        if node.arg == "pin_memory":
            node.value = ast.copy_location(ast.Constant(False), node.value)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node.value in ("cuda", "cuda:0"):
            node.value = "cpu"
        elif isinstance(node.value, str) and node.value.startswith("torch.cuda.") and node.value.endswith("Tensor"):
            node.value = node.value.replace("torch.cuda.", "torch.")
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.module == "torch.cuda":
            node.module = fake_cuda.__name__
        return node


def compile_on_cpu(source: bytes, path: str) -> CodeType:
    """Compile the source of a module with its CUDA calls rewritten. `path`: file name in tracebacks."""
    tree = _CudaToCpu().visit(ast.parse(source, path))
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


def cache_folder() -> Path:
    """Return the folder of this user's modules rewritten by this version of this file."""
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo_mp" / f"megatron_on_cpu_{version}"


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a rewritten module. Python's cache of compiled modules moves to the user's cache folder."""

    def __init__(self, name: str, path: str, patch: Patch | None) -> None:
        super().__init__(name, path)
        self.patch = patch

    def get_code(self, fullname: str) -> CodeType | None:
        # PYTHONDONTWRITEBYTECODE forbids files beside the sources; this cache lies elsewhere.
        forbidden = sys.dont_write_bytecode
        prefix = sys.pycache_prefix
        sys.dont_write_bytecode = False
        sys.pycache_prefix = str(cache_folder())
        try:
            return super().get_code(fullname)
        finally:
            sys.dont_write_bytecode = forbidden
            sys.pycache_prefix = prefix

    def source_to_code(self, data: Any, path: Any, **_: Any) -> CodeType:  # type: ignore[override]
        return compile_on_cpu(data, path)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__[FAKE_CUDA] = fake_cuda
        # During import Megatron warns that TransformerEngine and apex are missing, which is expected on a CPU.
        with warnings.catch_warnings(action="ignore"):
            super().exec_module(module)
        if self.patch:
            self.patch(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, patches: Mapping[str, Patch], packages: Sequence[str]) -> None:
        self.patches = patches
        self.packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in self.packages:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(fullname, spec.loader.path, self.patches.get(fullname))
        return spec


def install_import_hook(patches: Mapping[str, Patch]) -> None:
    """Rewrite Megatron's modules when they are imported. `patches`: module name -> function called after its import."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    imported = [name for name in sys.modules if name.startswith(f"{PACKAGE}.")]
    if imported:
        raise RuntimeError(f"{imported[0]} was imported before grpo_mp.platform.prepare(): call prepare() first")
    sys.meta_path.insert(0, _Finder(patches, (PACKAGE,)))
