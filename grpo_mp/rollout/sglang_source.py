"""What the installed SGLang knows, read from its source: to import it takes seconds."""

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

from grpo_mp.utils.errors import UserError


def source_folder() -> Path:
    """Return the folder of SGLang's runtime, `srt`. Raises UserError where SGLang is not installed."""
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        raise UserError("SGLang is not installed here: install the engine as launch/ does")
    return Path(package.submodule_search_locations[0], "srt")


def model_classes() -> Mapping[str, frozenset[str]]:
    """Return the classes of each module of SGLang's models, by the module's name."""
    return {file.stem: frozenset(_classes(file)) for file in sorted((source_folder() / "models").glob("*.py"))}


def _classes(file: Path) -> list[str]:
    lines = (line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("class "))
    return [line.removeprefix("class ").partition("(")[0].rstrip(":") for line in lines]


def argument_names() -> frozenset[str]:
    """Return the names of SGLang's server arguments."""
    source = source_folder()
    files = [source / "server_args.py", *sorted((source / "arg_groups" / "fields").glob("*.py"))]
    names = frozenset(name for file in files if file.exists() for name in _fields(file))
    if "model_path" not in names:
        raise UserError(f"{source}: this SGLang keeps its arguments elsewhere: install a supported version")
    return names


def _fields(file: Path) -> Iterator[str]:
    # Before 0.5.20 all fields are in class ServerArgs; since then in one class per namespace.
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and (node.name == "ServerArgs" or file.parent.name == "fields"):
            fields = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
            yield from (field.id for field in fields if isinstance(field, ast.Name))
