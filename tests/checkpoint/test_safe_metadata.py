"""Pickles of a checkpoint run nothing; those that Megatron writes are read."""

import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from grpo_mp.checkpoint.torch_dist import read_metadata
from grpo_mp.checkpoint.torch_dist_reader import describe_checkpoint
from grpo_mp.utils.errors import UserError
from tests.checkpoint.helpers import malicious_pickle, policy_of
from tests.policy.by_megatron import save_by_megatron


@pytest.fixture(scope="module")
def checkpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("metadata") / "policy"
    folder.mkdir()
    with policy_of(model, "float32") as policy:
        save_by_megatron(policy, folder)
    return folder


def test_malicious_metadata_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "megatron")
    (tmp_path / "megatron" / ".metadata").write_bytes(malicious_pickle(tmp_path / "ran"))
    with pytest.raises(UserError, match=r"\.metadata names (posix|os)\.mkdir, which is no part of a checkpoint"):
        describe_checkpoint(tmp_path / "megatron")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(AttributeError):
        FileSystemReader(tmp_path / "megatron").read_metadata()  # what torch does with it
    assert (tmp_path / "ran").exists()


def test_metadata_that_megatron_writes_is_read_as_torch_reads_it(checkpoint: Path) -> None:
    ours, theirs = read_metadata(checkpoint), FileSystemReader(checkpoint).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert any(isinstance(item, BytesStorageMetadata) for item in ours.state_dict_metadata.values())


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"hello", b"\x80\x04N.", b"\x80\x04]."])
def test_a_pickle_that_is_no_metadata_is_torn(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match=r"\.metadata is damaged .*: copy it again"):
        read_metadata(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_dtype_is_known(tmp_path: Path) -> None:
    dtypes = save_and_read_dtypes([torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64], tmp_path)
    assert dtypes == [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64]


def save_and_read_dtypes(dtypes: list[torch.dtype], folder: Path) -> list[torch.dtype]:
    import torch.distributed.checkpoint as dcp

    dcp.save({str(dtype): torch.zeros(2, dtype=dtype) for dtype in dtypes}, checkpoint_id=folder, no_dist=True)
    metadata = read_metadata(folder).state_dict_metadata
    return [metadata[str(dtype)].properties.dtype for dtype in dtypes]
