"""Megatron and SGLang are imported in their own rooms only: what else needs them asks these rooms."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "grpo_mp"
ROOMS = {
    "megatron": ("policy/", "checkpoint/", "distributed/", "platform/", "planner/meta_model.py"),
    "sglang": ("rollout/", "weight_sync/", "platform/"),
}


def imports(file: Path) -> set[str]:
    """First names of all modules that a file imports, anywhere in it."""
    libraries = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        libraries |= {name.partition(".")[0] for name in names}
    return libraries


def test_each_library_stays_in_its_rooms() -> None:
    imported = {str(file.relative_to(PACKAGE)): imports(file) for file in PACKAGE.rglob("*.py")}
    outside = [
        f"{file} imports {library}"
        for library, rooms in ROOMS.items()
        for file, names in imported.items()
        if library in names and not file.startswith(rooms)
    ]
    assert not outside
    assert all(any(library in names for names in imported.values()) for library in ROOMS)


# A room imports rooms that stand before it, and nothing else of this package.
ORDER = (
    "errors",
    "log",
    "options",
    "user_code",
    "registry",
    "section",
    "types",
    "phases",
    "algorithms",
    "rewards",
    "evaluation",
    "models",
    "config",
    "data",
    "platform",
    "distributed",
    "batching",
    "checkpoint",
    "monitor",
    "pages",
    "scheduler",
    "policy",
    "weight_sync",
    "rollout",
    "planner",
    "trainer",
    "examples",
    "train",
    "evaluate",
    "launch",
    "cli",
    "__main__",  # of any folder
)


def imported_rooms(file: Path) -> set[str]:
    """Rooms of this package that a file imports, anywhere in it."""
    rooms = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == PACKAGE.name:
            rooms |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            package, _, rest = node.module.partition(".")
            rooms |= {rest.partition(".")[0]} if package == PACKAGE.name else set()
        elif isinstance(node, ast.Import):
            names = (alias.name.split(".") for alias in node.names)
            rooms |= {parts[1] for parts in names if parts[0] == PACKAGE.name and len(parts) > 1}
    return rooms


def room_of(file: Path) -> str:
    return "__main__" if file.name == "__main__.py" else file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_go_one_way() -> None:
    files = [file for file in PACKAGE.rglob("*.py") if file != PACKAGE / "__init__.py"]
    assert {room_of(file) for file in files} == set(ORDER)
    upward = [
        f"{file.relative_to(PACKAGE)} imports {room}"
        for file in files
        for room in imported_rooms(file) - {room_of(file)}
        if ORDER.index(room) > ORDER.index(room_of(file))
    ]
    assert not upward
