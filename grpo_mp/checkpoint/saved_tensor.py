"""One tensor that torch.save wrote into a file, read into place: torch.load would copy it twice on its way."""

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LOCAL_HEADER = 30  # bytes of a zip member's own header before its name


def read_into(file: Path, start: int, length: int, out: Tensor) -> bool:
    """Fill `out` from the archive of `length` bytes at `start`. False, and nothing read, where it is no plain tensor.

    Plain: contiguous, of this shape, in a storage of its own, stored without compression.
    """
    with file.open("rb", buffering=0) as stream:
        with zipfile.ZipFile(io.BufferedReader(_Window(stream, start, length))) as archive:
            members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        record = _plain_record(stream, start, members, out)
        if record is None:
            return False
        return _fill(stream, start, record, memoryview(out.view(-1).view(torch.uint8).numpy().data))


def _plain_record(
    stream: io.FileIO, start: int, members: Mapping[str, zipfile.ZipInfo], out: Tensor
) -> zipfile.ZipInfo | None:
    if "data.pkl" not in members or _content(stream, start, members.get("byteorder")) != b"little":
        return None
    try:
        found = _Layout(io.BytesIO(_content(stream, start, members["data.pkl"]))).load()
    except pickle.UnpicklingError:
        return None
    if not isinstance(found, tuple):
        return None
    storage, shape, stride = found
    record = members[f"data/{storage}"]
    plain = shape == tuple(out.shape) and stride == out.stride() and record.file_size == out.nbytes
    return record if plain and record.compress_type == zipfile.ZIP_STORED and out.is_contiguous() else None


def _content(stream: io.FileIO, start: int, member: zipfile.ZipInfo | None) -> bytes:
    """Of a small member. Not by zipfile: torch may leave checksums out."""
    content = bytearray(member.file_size if member else 0)
    if member:
        _fill(stream, start, member, memoryview(content))
    return bytes(content)


def _fill(stream: io.FileIO, start: int, member: zipfile.ZipInfo, memory: memoryview) -> bool:
    """Whether the file had enough bytes."""
    stream.seek(start + member.header_offset)
    header = stream.read(LOCAL_HEADER)
    skipped = sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))  # name, and padding behind it
    stream.seek(start + member.header_offset + LOCAL_HEADER + skipped)
    while memory and (count := stream.readinto(memory)):
        memory = memory[count:]
    return not memory


class _Layout(pickle.Unpickler):
    """Reads how a tensor lies in its storage; nothing that a file names is called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, _, shape, stride, *__: (storage, tuple(shape), tuple(stride))
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a tensor")

    def persistent_load(self, pid: Any) -> str:
        """The storage's key in the archive."""
        return str(pid[2])


class _Window(io.RawIOBase):
    """A stretch of a file, as a file."""

    def __init__(self, stream: io.FileIO, start: int, length: int) -> None:
        self._stream, self._start, self._length, self._at = stream, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._stream.seek(self._start + self._at)
        count = self._stream.readinto(memoryview(buffer)[: max(0, self._length - self._at)]) or 0
        self._at += count
        return count
