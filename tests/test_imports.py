"""Megatron and SGLang are imported in their own packages only: what else needs them asks these packages."""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "grpo_mp"
LIBRARY_USERS = {
    "megatron": ("policy/", "checkpoint/", "distributed/", "platform/"),
    "sglang": ("rollout/", "weight_sync/", "platform/"),
}


def imports(file: Path) -> set[str]:
    """Dotted names of all that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_each_library_stays_in_its_packages() -> None:
    imported = {
        str(file.relative_to(PACKAGE)): {name.partition(".")[0] for name in imports(file)}
        for file in PACKAGE.rglob("*.py")
    }
    outside = [
        f"{file} imports {library}"
        for library, packages in LIBRARY_USERS.items()
        for file, names in imported.items()
        if library in names and not file.startswith(packages)
    ]
    assert not outside
    assert all(any(library in names for names in imported.values()) for library in LIBRARY_USERS)


# A subpackage, or a module beside them, imports only what stands before it.
ORDER = (
    "utils",
    "algorithms",
    "sandbox",
    "rewards",
    "models",
    "config",
    "data",
    "platform",
    "distributed",
    "batching",
    "checkpoint",
    "policy",
    "rollout",
    "weight_sync",
    "monitor",
    "trainer",
    "doctor",
    "planner",
    "evaluate",
    "sample",
    "train",
    "sft",
    "pipeline",
    "cli",
    "__main__",
)


def imported_packages(file: Path) -> set[str]:
    return {name.split(".")[1] for name in imports(file) if name.startswith(f"{PACKAGE.name}.")}


def package_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_go_one_way() -> None:
    files = [file for file in PACKAGE.rglob("*.py") if file != PACKAGE / "__init__.py"]
    assert {package_of(file) for file in files} == set(ORDER)
    upward = [
        f"{file.relative_to(PACKAGE)} imports {package}"
        for file in files
        for package in imported_packages(file) - {package_of(file)}
        if ORDER.index(package) > ORDER.index(package_of(file))
    ]
    assert not upward


def test_the_page_lists_the_packages_in_their_order() -> None:
    rows = [line.split("|")[1] for line in (PACKAGE / "README.md").read_text().splitlines() if line.startswith("| [")]
    assert re.findall(r"\[(\w+)\]", "".join(rows)) == [package for package in ORDER if package != "__main__"]
