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
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {name.partition(".")[0] for name in names}
    return found


def test_each_library_stays_in_its_rooms() -> None:
    held = {str(file.relative_to(PACKAGE)): imports(file) for file in PACKAGE.rglob("*.py")}
    outside = [
        f"{file} imports {library}"
        for library, rooms in ROOMS.items()
        for file, names in held.items()
        if library in names and not file.startswith(rooms)
    ]
    assert not outside
    assert all(any(library in names for names in held.values()) for library in ROOMS)
