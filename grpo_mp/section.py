"""Base class of the settings' sections, the walk over nested ones, and parsing of byte sizes."""

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Section(BaseModel):
    """A frozen section of the settings that refuses unknown names."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def section_type(annotation: Any) -> type[Section] | None:
    """Return the section type in an annotation `X`, `X | None` or `dict[str, X]`; None where there is none."""
    types = [item for item in (annotation, *get_args(annotation)) if isinstance(item, type)]
    return next((item for item in types if issubclass(item, Section)), None)


def nested_sections(section: type[Section], path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield a section and all below it with their dotted names; NAME stands for a name that the user chooses."""
    yield path, section
    for name, field in section.model_fields.items():
        nested = section_type(field.annotation)
        if nested:
            chosen = ".NAME" if get_origin(field.annotation) is dict else ""
            yield from nested_sections(nested, f"{path}.{name}{chosen}".removeprefix("."))


def parse_bytes(text: str) -> int:
    """Parse a byte size: '512MiB' -> 536870912. Raises ValueError for an unknown unit."""
    for unit, size in UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * size)
    if text.isdigit():
        return int(text)
    raise ValueError(f"{text!r} is not a number of bytes: write 512MiB, 1GiB or a plain number")


def as_bytes(value: Any) -> Any:
    """Parse text with a unit as bytes; leave any other value to the type of the field."""
    return parse_bytes(value) if isinstance(value, str) else value
