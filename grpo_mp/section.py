"""Base class of the settings' sections, and parsing of byte sizes."""

from typing import Any

from pydantic import BaseModel, ConfigDict

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Section(BaseModel):
    """A frozen section of the settings that refuses unknown names."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


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
