"""Files as a bad disk, a bad copy or a stranger leaves them."""

import pickle
from pathlib import Path
from typing import Any


def flip_bit(file: Path, byte: int, bit: int = 3) -> None:
    content = bytearray(file.read_bytes())
    content[byte] ^= 1 << bit
    file.write_bytes(content)


class Touch:
    """Unpickled freely, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def hostile(file: Path) -> bytes:
    """A pickle that makes `file` where it is loaded."""
    return pickle.dumps(Touch(file))
