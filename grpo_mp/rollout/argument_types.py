"""The types of SGLang's server arguments, read from its source, and whether values are of them."""

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from grpo_mp.rollout.sglang_source import source_folder
from grpo_mp.utils.errors import UserError

KINDS = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}
NAMES = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}
LEAST = {"max_running_requests": 1, "max_total_tokens": 1, "ep_size": 1, "attn_dp_size": 1, "page_size": 1}
SHARES = ("mem_fraction_static",)  # of the device's memory: above 0 and below 1
JSON = ("json_model_override_args",)


@dataclass(frozen=True)
class ArgumentType:
    """What an argument may be: of a kind of KINDS, one of some choices, or anything where its type is another."""

    kind: str = ""
    choices: tuple[Any, ...] = ()
    nullable: bool = False

    def problem(self, value: Any) -> str:
        """Return what a value should be, where it is not; or nothing."""
        if value is None:
            return "" if self.nullable or not (self.kind or self.choices) else "a value, not null"
        if self.choices:
            return "" if value in self.choices else f"one of {', '.join(map(str, self.choices))}"
        if not self.kind:
            return ""
        is_of_kind = isinstance(value, KINDS[self.kind]) and (self.kind == "bool" or not isinstance(value, bool))
        return "" if is_of_kind else NAMES[self.kind]


def argument_types() -> dict[str, ArgumentType]:
    """Read the installed SGLang's server arguments and their types from its source: importing it takes seconds.

    Raises UserError when SGLang is not installed.
    """
    source = source_folder()
    files = [source / "server_args.py", *sorted((source / "arg_groups" / "fields").glob("*.py"))]
    types = {name: found for file in files if file.exists() for name, found in _fields(file)}
    if "model_path" not in types:
        raise UserError(f"{source}: this SGLang keeps its arguments elsewhere: install a supported version")
    return types


def check_values(arguments: Mapping[str, Any], types: Mapping[str, ArgumentType], section: str) -> None:
    """Raise UserError for a value that is not of its argument's type, or that no engine starts with."""
    for name, value in arguments.items():
        wanted = types[name].problem(value) or (_problem(name, value) if value is not None else "")
        if wanted:
            raise UserError(f"{section}.{name}={value!r:.60}: give {wanted}")


def _problem(name: str, value: Any) -> str:
    """Return what a value of the right type should be, where it is not; or nothing."""
    if name in LEAST and value < LEAST[name]:
        return f"{LEAST[name]} or more"
    if name in SHARES and not 0 < value < 1:
        return "a share above 0 and below 1"
    return "a JSON object in text" if name in JSON and not _is_json_object(value) else ""


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _fields(file: Path) -> Iterator[tuple[str, ArgumentType]]:
    # Before 0.5.20 all fields are in class ServerArgs; since then in one class per namespace.
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and (node.name == "ServerArgs" or file.parent.name == "fields"):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    yield item.target.id, _type_of(item.annotation)


def _type_of(annotation: ast.expr) -> ArgumentType:
    """Return the type that an annotation says: `T`, or `A[T, help]`, with T a kind, Optional or Literal of some."""
    if _is_subscript(annotation, "A"):
        annotation = annotation.slice.elts[0] if isinstance(annotation.slice, ast.Tuple) else annotation.slice
    nullable = False
    if _is_subscript(annotation, "Optional"):
        annotation, nullable = annotation.slice, True
    if _is_subscript(annotation, "Literal"):
        choices = ast.literal_eval(annotation.slice)
        choices = choices if isinstance(choices, tuple) else (choices,)
        return ArgumentType("", choices, nullable or None in choices)
    kind = annotation.id if isinstance(annotation, ast.Name) and annotation.id in KINDS else ""
    return ArgumentType(kind, (), nullable)


def _is_subscript(annotation: ast.expr, name: str) -> TypeGuard[ast.Subscript]:
    generic = annotation.value if isinstance(annotation, ast.Subscript) else None
    return isinstance(generic, ast.Name) and generic.id == name
