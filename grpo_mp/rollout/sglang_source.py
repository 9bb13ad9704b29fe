"""Facts about the installed SGLang, read from its source files because importing SGLang takes seconds."""

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from grpo_mp.utils.errors import UserError


def source_folder() -> Path:
    """Return the folder of SGLang's runtime, `srt`. Raises UserError if SGLang is not installed."""
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        raise UserError("SGLang is not installed here: install the engine as launch/ does")
    return Path(package.submodule_search_locations[0], "srt")


def model_classes() -> Mapping[str, frozenset[str]]:
    """Return the class names in each module of SGLang's `models` package, by module name."""
    return {file.stem: frozenset(_classes(file)) for file in sorted((source_folder() / "models").glob("*.py"))}


def _classes(file: Path) -> list[str]:
    lines = (line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("class "))
    return [line.removeprefix("class ").partition("(")[0].rstrip(":") for line in lines]


def argument_names() -> frozenset[str]:
    """Return the names of SGLang's server arguments: the annotated fields of the classes in `arg_groups/fields`."""
    files = sorted((source_folder() / "arg_groups" / "fields").glob("*.py"))
    classes = [node for file in files for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    targets = [item.target for node in classes for item in node.body if isinstance(item, ast.AnnAssign)]
    return frozenset(target.id for target in targets if isinstance(target, ast.Name))
