"""Files as a bad disk, a bad copy or a stranger leaves them."""

import os
import pickle
from pathlib import Path
from typing import Any


def flip_bit(file: Path, byte: int, bit: int = 3) -> None:
    content = bytearray(file.read_bytes())
    content[byte] ^= 1 << bit
    file.write_bytes(content)


class Mkdir:
    """Unpickled freely, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def hostile(folder: Path) -> bytes:
    """A pickle that makes `folder` where it is loaded."""
    return pickle.dumps(Mkdir(folder), protocol=2)  # as torch.save has it
