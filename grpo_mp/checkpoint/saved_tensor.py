"""Read one tensor that torch.save wrote straight into memory; torch.load would copy it twice."""

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
    """Fill `out` from the archive of `length` bytes at `start`. Returns False, and reads nothing, for no plain tensor.

    Plain: contiguous, of this shape, in a storage of its own, stored without compression.
    """
    with file.open("rb", buffering=0) as stream:
        with zipfile.ZipFile(io.BufferedReader(_FileSlice(stream, start, length))) as archive:
            members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        record = _find_storage(stream, start, members, out)
        if record is None:
            return False
        return _fill_from_member(stream, start, record, memoryview(out.view(-1).view(torch.uint8).numpy().data))


def _find_storage(
    stream: io.FileIO, start: int, members: Mapping[str, zipfile.ZipInfo], out: Tensor
) -> zipfile.ZipInfo | None:
    """Return the archive member that has the bytes of a plain tensor like `out`; None where there is none."""
    if "data.pkl" not in members or _read_member(stream, start, members.get("byteorder")) != b"little":
        return None
    try:
        layout = _TensorUnpickler(io.BytesIO(_read_member(stream, start, members["data.pkl"]))).load()
    except pickle.UnpicklingError:
        return None
    if not isinstance(layout, tuple):
        return None
    storage, shape, stride = layout
    record = members[f"data/{storage}"]
    fits = shape == tuple(out.shape) and stride == out.stride() and record.file_size == out.nbytes
    return record if fits and record.compress_type == zipfile.ZIP_STORED and out.is_contiguous() else None


def _read_member(stream: io.FileIO, start: int, member: zipfile.ZipInfo | None) -> bytes:
    """Read a small member. Not by zipfile: torch may leave checksums out."""
    content = bytearray(member.file_size if member else 0)
    if member:
        _fill_from_member(stream, start, member, memoryview(content))
    return bytes(content)


def _fill_from_member(stream: io.FileIO, start: int, member: zipfile.ZipInfo, memory: memoryview) -> bool:
    """Fill `memory` from a stored member; returns False where the file ends too early."""
    stream.seek(start + member.header_offset)
    header = stream.read(LOCAL_HEADER)
    skipped = sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))  # name, and padding behind it
    stream.seek(start + member.header_offset + LOCAL_HEADER + skipped)
    while memory and (count := stream.readinto(memory)):
        memory = memory[count:]
    return not memory


class _TensorUnpickler(pickle.Unpickler):
    """Unpickles a tensor to (storage key, shape, stride); nothing that a file names is called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, _, shape, stride, *__: (storage, tuple(shape), tuple(stride))
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a tensor")

    def persistent_load(self, pid: Any) -> str:
        """Return the storage's key in the archive."""
        return str(pid[2])


class _FileSlice(io.RawIOBase):
    """`length` bytes of a file from `start`, as a file of their own."""

    def __init__(self, stream: io.FileIO, start: int, length: int) -> None:
        self._stream, self._start, self._length, self._position = stream, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._stream.seek(self._start + self._position)
        count = self._stream.readinto(memoryview(buffer)[: max(0, self._length - self._position)]) or 0
        self._position += count
        return count
