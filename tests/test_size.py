"""Functions and files stay small enough to read at once, and no line packs two assignments."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_LINES_OF_FUNCTION = 60
MOST_LINES_OF_FILE = 500


def too_long(file: Path) -> list[str]:
    source = file.read_text()
    lengths = [
        (f"{file.name}:{node.lineno} {node.name}", (node.end_lineno or 0) - node.lineno + 1, MOST_LINES_OF_FUNCTION)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths.append((file.name, len(source.splitlines()), MOST_LINES_OF_FILE))
    return [f"{name} has {lines} lines" for name, lines, most in lengths if lines > most]


def all_files() -> list[Path]:
    files = [file for folder in ("grpo_mp", "tools", "tests") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    return files


def packed_assignments(source: str) -> list[int]:
    """Return the lines that assign several values to several names, other than swaps, which read what they assign."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Tuple) and not set(map(ast.unparse, target.elts)) & _parts(node.value)
    ]


def _parts(value: ast.Tuple) -> set[str]:
    return {ast.unparse(node) for node in ast.walk(value) if isinstance(node, ast.Name | ast.Attribute | ast.Subscript)}


def test_no_function_and_no_file_is_too_long() -> None:
    assert not [message for file in all_files() for message in too_long(file)]


def test_no_line_packs_two_assignments() -> None:
    assert packed_assignments("a, b = 1, 2\nc, d = d, c\ne, (f, g) = x, y\nh, i = pair") == [1, 3]
    lines = {file: packed_assignments(file.read_text()) for file in all_files()}
    assert not [f"{file.name}:{line}" for file, found in lines.items() for line in found]
