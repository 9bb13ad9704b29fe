"""Templates of pages and tables in Markdown. Pure, except that a template is read from its file."""

from collections.abc import Iterable
from pathlib import Path


def fill(page: str, **parts: str) -> str:
    """Put `parts` in their places in the template `page`.md, where `{{name}}` stands for a part."""
    text = Path(__file__).with_name(f"{page}.md").read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"{{{{{name}}}}}", part)
    return text


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table whose every line has its end."""
    head = tuple(head)
    return _line(head) + "|" + "---|" * len(head) + "\n" + "".join(map(_line, rows))


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
