"""Measure the size and the structure of the code: `python -m tests.bench.house`. Reads files only."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from grpo_mp.config import Settings, SftSettings
from grpo_mp.utils.section import nested_sections, section_type

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "grpo_mp"
MANY_ARGUMENTS = 5
MANY_PARAMETERS = 6
LOOPS = ("train", "sft", "evaluate", "sample")
WHOLE = {"Settings", "SftSettings", "TrainContext", "RolloutContext", "PolicyContext", "SftContext"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A Python file."""

    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def comment_lines(self) -> int:
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})

    @property
    def room(self) -> str:
        """Name of the package or module directly under grpo_mp that this file belongs to."""
        return self.path.relative_to(PACKAGE).parts[0].removesuffix(".py")

    @property
    def imported_rooms(self) -> set[str]:
        rooms = set()
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and node.module == PACKAGE.name:
                rooms |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE.name}."):
                rooms.add(str(node.module).split(".")[1])
        return rooms - {self.room}


def main() -> None:
    package = [Source(file) for file in sorted(PACKAGE.rglob("*.py"))]
    tests = [Source(file) for file in sorted((ROOT / "tests").rglob("*.py"))]
    graph = import_graph([source for source in package if source.path != PACKAGE / "__init__.py"])
    long_lists = [
        function for source in package for function in functions(source) if parameters(function) > MANY_PARAMETERS
    ]
    lines = sum(source.lines for source in package)
    rows = {
        "package, lines": lines,
        "package, kB": sum(len(source.text.encode()) for source in package) // 1000,
        "package, files": len(package),
        "tests, lines": sum(source.lines for source in tests),
        "rooms": len(graph),
        "floors of the import graph": max(floors(graph).values()),
        "arrows of the import graph": sum(map(len, graph.values())),
        "settings": len(settings()),
        "words of Markdown": sum(len(page.read_text(encoding="utf-8").split()) for page in pages()),
        "calls with five or more positional arguments, of 1,000": round(positional_calls(package), 1),
        "functions with more than six parameters": len(long_lists),
        "of these public": sum(not function.name.startswith("_") for function in long_lists),
        "functions beside the loops that get whole settings or a context": len(
            [one for source in package if source.room not in LOOPS for one in functions(source) if gets_everything(one)]
        ),
        "lines with comments, %": round(100 * sum(source.comment_lines for source in package) / lines, 1),
    }
    for name, value in rows.items():
        print(f"{name:66} {value:>10,}")


def import_graph(sources: list[Source]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {source.room: set() for source in sources}
    for source in sources:
        graph[source.room] |= source.imported_rooms
    return graph


def floors(graph: dict[str, set[str]]) -> dict[str, int]:
    """Return each room's floor: 1 above the highest room that it imports. Raises ValueError for a circle."""
    known: dict[str, int] = {}
    while len(known) < len(graph):
        ready = [room for room, below in graph.items() if room not in known and below <= known.keys()]
        if not ready:
            raise ValueError(f"these rooms import each other: {', '.join(sorted(graph.keys() - known.keys()))}")
        known |= {room: 1 + max((known[one] for one in graph[room]), default=0) for room in ready}
    return known


def settings() -> set[str]:
    return {
        f"{path}.{name}"
        for root in (Settings, SftSettings)
        for path, section in nested_sections(root)
        for name, field in section.model_fields.items()
        if section_type(field.annotation) is None
    }


def pages() -> Iterator[Path]:
    """Yield the pages of Markdown that belong to the project."""
    for pattern in ("*.md", ".github/*.md", "configs/*.md", "launch/*.md", "tests/**/*.md", "tools/**/*.md"):
        yield from ROOT.glob(pattern)
    yield from PACKAGE.rglob("*.md")


def functions(source: Source) -> Iterator[Function]:
    yield from (node for node in source.nodes if isinstance(node, Function))


def parameters(function: Function) -> int:
    """Count the parameters of a function, `self` and `cls` left out."""
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def gets_everything(function: Function) -> bool:
    """Return whether a parameter is the settings of a whole run, or a context that holds them."""
    annotations = [one.annotation for one in (*function.args.args, *function.args.kwonlyargs) if one.annotation]
    words = {word for annotation in annotations for word in re.findall(r"\w+", ast.unparse(annotation))}
    return bool(words & WHOLE)


def positional_calls(sources: list[Source]) -> float:
    calls = [node for source in sources for node in source.nodes if isinstance(node, ast.Call)]
    return 1000 * sum(len(call.args) >= MANY_ARGUMENTS for call in calls) / len(calls)


if __name__ == "__main__":
    main()
