"""Functions and files stay small enough to read at once."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_LINES_OF_FUNCTION, MOST_LINES_OF_FILE = 60, 500


def too_long(file: Path) -> list[str]:
    source = file.read_text()
    lengths = [
        (f"{file.name}:{node.lineno} {node.name}", (node.end_lineno or 0) - node.lineno + 1, MOST_LINES_OF_FUNCTION)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths.append((file.name, len(source.splitlines()), MOST_LINES_OF_FILE))
    return [f"{name} has {lines} lines" for name, lines, most in lengths if lines > most]


def test_no_function_and_no_file_is_too_long() -> None:
    files = [file for folder in ("grpo_mp", "tools", "tests") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    assert not [message for file in files for message in too_long(file)]
