"""What every section of the settings is, and how a number of bytes is written in one."""

from typing import Any

from pydantic import BaseModel, ConfigDict

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Section(BaseModel):
    """Frozen; an unknown name is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def parse_bytes(text: str) -> int:
    """'512MiB' -> 536870912. Raises ValueError for another unit."""
    for unit, size in UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * size)
    if text.isdigit():
        return int(text)
    raise ValueError(f"{text!r} is not a number of bytes: write 512MiB, 1GiB or a plain number")


def as_bytes(value: Any) -> Any:
    """Text with a unit as a number; anything else is left to the type of the field."""
    return parse_bytes(value) if isinstance(value, str) else value
