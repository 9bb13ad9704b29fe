"""Read pickles of Megatron's torch_dist format without running what they name.

`.metadata` is a pickle, and so are the objects beside tensors. torch would import and call whatever such a file
names; a checkpoint may come from anywhere, so here only the few classes of the format are known.
"""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from grpo_mp.checkpoint.describe import TORCH_DIST
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.reading import check_regular

ALLOWED_NAMES = {  # module -> names
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.planner": (  # Megatron keeps the plans of a save for the next one
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    ),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),  # Megatron 0.15
    "torch.distributed._shard.sharded_tensor.metadata": ("MEM_FORMAT_ENCODING", "TensorProperties"),  # of older torch
    "torch.serialization": ("_get_layout",),  # looks a layout up by its name
    "torch": ("Size",),
    "collections": ("OrderedDict", "defaultdict"),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
}
WEIGHTS_ONLY_ENV = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch.load reads it at every call


class SafeReader(FileSystemReader):
    """torch's reader of a torch_dist folder, but with this module's `read_metadata`."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the folder's metadata. Raises UserError as the function of that name."""
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_metadata(folder: Path) -> Metadata:
    """Read the folder's `.metadata`. Raises UserError where it is damaged, or names anything outside the format."""
    file = folder / TORCH_DIST
    try:
        with check_regular(file, "copy it again").open("rb") as stream:
            metadata = _Unpickler(stream).load()
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}: copy it again") from error
    except ForeignNameError as error:
        raise UserError(f"{file} names {error}, which is no part of a checkpoint: do not use this folder") from error
    except Exception as error:
        raise UserError(f"{file} is damaged ({type(error).__name__}): copy it again") from error
    tables = ("state_dict_metadata", "storage_data")
    if not isinstance(metadata, Metadata) or not all(isinstance(vars(metadata).get(table), dict) for table in tables):
        raise UserError(f"{file} is damaged (it holds no list of tensors): copy it again")
    return metadata


@contextmanager
def restrict_unpickling(folder: Path) -> Iterator[None]:
    """Let Megatron load from `folder` without running what its files name.

    Raises UserError as `read_metadata`, which Megatron then unpickles again; objects beside tensors, which Megatron
    reads by torch.load, are read as weights are.
    """
    read_metadata(folder)
    before = os.environ.get(WEIGHTS_ONLY_ENV)
    os.environ[WEIGHTS_ONLY_ENV] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[WEIGHTS_ONLY_ENV]
        else:
            os.environ[WEIGHTS_ONLY_ENV] = before


class ForeignNameError(pickle.UnpicklingError):
    """A pickle names something outside its format."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and name not in ALLOWED_NAMES.get(module, ()):
            raise ForeignNameError(f"{module}.{name}")
        return super().find_class(module, name)
