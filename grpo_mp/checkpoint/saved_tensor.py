"""Read one tensor that torch.save wrote straight into memory; torch.load would copy it twice."""

import io
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.utils import _create_file_view


def read_into(file: Path, start: int, length: int, out: Tensor) -> bool:
    """Fill `out` from the archive of `length` bytes at `start`. Returns False, and reads nothing, for no plain tensor.

    Plain: contiguous, of this shape, in a storage of its own.
    """
    with file.open("rb", buffering=0) as stream:
        view: Any = _create_file_view(stream, start, length)
        archive: Any = torch._C.PyTorchFileReader(view)  # torch's annotations lack half of its methods
        if not archive.has_record("byteorder") or archive.get_record("byteorder") != b"little":
            return False
        try:
            layout = _TensorUnpickler(io.BytesIO(archive.get_record("data.pkl"))).load()
        except pickle.UnpicklingError:
            return False
        if not isinstance(layout, tuple) or layout[1:] != (tuple(out.shape), out.stride()) or not out.is_contiguous():
            return False
        record = f"data/{layout[0]}"
        if archive.get_record_size(record) != out.nbytes:
            return False
        stream.seek(start + archive.get_record_offset(record))
        memory = memoryview(out.view(-1).view(torch.uint8).numpy().data)
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
