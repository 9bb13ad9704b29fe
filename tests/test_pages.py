"""Pages name only what exists: files, functions, settings, commands."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for pattern in ("*.md", "grpo_mp/**/*.md", "launch/*.md", "configs/*.md", "tests/*.md", ".github/*.md")
    for page in ROOT.glob(pattern)
)
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def defined_names(file: Path) -> set[str]:
    """Names of classes and functions of a module, methods as Class.method."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            methods = [item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
            names |= {node.name, *(f"{node.name}.{method}" for method in methods)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
    return names


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    missing = [
        target for target in targets if not target.startswith("http") and not (page.parent / target.strip()).exists()
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_and_functions_exist(page: Path) -> None:
    """A file may be given from the repository, from grpo_mp, or from the page's folder; a name behind it is in it."""
    missing = []
    for path, name in re.findall(r"`([\w/]+/\w+\.(?:py|yaml|sh|txt))`(?:\s+`([A-Za-z_.]+)`)?", page.read_text()):
        files = [folder / path for folder in (ROOT, ROOT / "grpo_mp", page.parent) if (folder / path).exists()]
        if not files and not re.search("[A-Z]", path):  # capitals are placeholders
            missing.append(path)
        elif name and files and files[0].suffix == ".py" and name not in defined_names(files[0]):
            missing.append(f"{path} {name}")
    assert not missing
