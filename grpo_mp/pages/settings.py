"""The page of the settings: a table for each section, with type, default and description of every setting."""

from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from grpo_mp.config import Settings
from grpo_mp.pages.markdown import fill, table
from grpo_mp.section import Section, nested_sections, section_type

HEAD = ("setting", "type", "default", "description")
NAMES = {
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
    bool: "`true`, `false`",
    Any: "any",
    NoneType: "null",
}
LIMITS = ((Gt, "gt", ">"), (Ge, "ge", ">="), (Lt, "lt", "<"), (Le, "le", "<="))


def page() -> str:
    """Return the page as Markdown."""
    return fill("configs", settings="\n".join(_section(path, section) for path, section in nested_sections(Settings)))


def _section(path: str, section: type[Section]) -> str:
    rows = (_cells(name, field) for name, field in section.model_fields.items())
    return f"## {path or 'Sections'}\n\n{section.__doc__}\n\n{table(HEAD, rows)}"


def _cells(name: str, field: FieldInfo) -> tuple[str, ...]:
    limits = [
        f"{sign} {getattr(item, attribute):g}"
        for item in field.metadata
        for kind, attribute, sign in LIMITS
        if isinstance(item, kind)
    ]
    return f"`{name}`", ", ".join([_type(field.annotation), *limits]), _default(field), field.description or ""


def _type(annotation: Any) -> str:
    """Name a type in words: choices by their values, sections as such."""
    items = get_args(annotation)
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{item}`" for item in items)
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_type(item) for item in items)
    if get_origin(annotation) is Annotated:
        return _type(items[0])
    if get_origin(annotation) is dict:
        return f"mapping of names to {_type(items[1])}"
    if get_origin(annotation) is tuple:
        return f"list of {_type(items[0])}" + ("" if Ellipsis in items else f", {len(items)} of them")
    return "section" if section_type(annotation) else NAMES[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    if isinstance(value, Section):
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if isinstance(value, str) and not value.strip() else str(value)
