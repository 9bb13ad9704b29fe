"""Pickles of a checkpoint run nothing; those that Megatron writes are read."""

import json
import random
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from grpo_mp.checkpoint.convert import to_megatron
from grpo_mp.checkpoint.safe_metadata import read_metadata
from grpo_mp.checkpoint.torch_dist_reader import TorchDistReader, describe_torch_dist
from grpo_mp.policy.checkpoint import load_policy
from grpo_mp.utils.errors import UserError
from tests.checkpoint.helpers import flip_bit, malicious_pickle, no_progress, policy_of
from tests.policy.by_megatron import copies, save_by_megatron, unequal

FLIPS = 200


@pytest.fixture(scope="module")
def checkpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Megatron writes it."""
    folder = tmp_path_factory.mktemp("metadata") / "policy"
    folder.mkdir()
    with policy_of(model, "float32") as policy:
        save_by_megatron(policy, folder)
    return folder


def test_malicious_metadata_is_not_run(checkpoint: Path, model: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "megatron")
    (tmp_path / "megatron" / ".metadata").write_bytes(malicious_pickle(tmp_path / "ran"))
    with pytest.raises(UserError, match=r"\.metadata names (posix|os)\.mkdir, which is no part of a checkpoint"):
        describe_torch_dist(tmp_path / "megatron")
    with policy_of(model, "float32") as policy, pytest.raises(UserError, match="which is no part of a checkpoint"):
        load_policy(policy, tmp_path / "megatron")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(AttributeError):
        FileSystemReader(tmp_path / "megatron").read_metadata()  # what torch does with it
    assert (tmp_path / "ran").exists()


def test_malicious_metadata_is_not_run_by_a_conversion(model: Path, tmp_path: Path) -> None:
    to_megatron(model, tmp_path / "megatron", no_progress)
    record = json.loads((tmp_path / "megatron" / "conversion.json").read_text())
    (tmp_path / "megatron" / "conversion.json").write_text(json.dumps(record | {"joint": {}}))
    (tmp_path / "megatron" / ".metadata").write_bytes(malicious_pickle(tmp_path / "ran"))
    with pytest.raises(UserError, match="which is no part of a checkpoint"):
        TorchDistReader(tmp_path / "megatron")
    assert not (tmp_path / "ran").exists()


def test_a_malicious_object_beside_the_tensors_is_not_run(checkpoint: Path, model: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "megatron")
    metadata = read_metadata(checkpoint)
    objects = {key for key, item in metadata.state_dict_metadata.items() if isinstance(item, BytesStorageMetadata)}
    info = next(info for index, info in metadata.storage_data.items() if index.fqn in objects)
    payload = malicious_pickle(tmp_path / "ran")
    assert len(payload) <= info.length
    file = tmp_path / "megatron" / info.relative_path
    content = bytearray(file.read_bytes())
    content[info.offset : info.offset + info.length] = payload.ljust(info.length, b"\0")
    file.write_bytes(content)
    with policy_of(model, "float32") as policy, pytest.raises(UserError, match="the checkpoint cannot be read"):
        load_policy(policy, tmp_path / "megatron")
    assert not (tmp_path / "ran").exists()


def test_metadata_that_megatron_writes_is_read_as_torch_reads_it(checkpoint: Path, model: Path) -> None:
    ours, theirs = read_metadata(checkpoint), FileSystemReader(checkpoint).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert any(isinstance(item, BytesStorageMetadata) for item in ours.state_dict_metadata.values())
    with policy_of(model, "float32") as policy:
        saved = copies(policy)
        for tensor in policy.tensors.values():
            tensor.detach().fill_(7.0)
        load_policy(policy, checkpoint)
        assert unequal(policy, saved) == []


def test_flipped_bits_raise_user_errors_only(checkpoint: Path, tmp_path: Path) -> None:
    """Without a checksum some flips do no harm, or change a name; none raises anything else."""
    shutil.copy(checkpoint / ".metadata", tmp_path)
    size = (tmp_path / ".metadata").stat().st_size
    draw = random.Random(0)
    refused = 0
    for _ in range(FLIPS):
        byte, bit = draw.randrange(size), draw.randrange(8)
        flip_bit(tmp_path / ".metadata", byte, bit)
        try:
            with little_more_memory():
                read_metadata(tmp_path)
        except UserError:
            refused += 1
        flip_bit(tmp_path / ".metadata", byte, bit)
    assert refused > FLIPS // 20
    assert read_metadata(tmp_path).state_dict_metadata == read_metadata(checkpoint).state_dict_metadata


@contextmanager
def little_more_memory() -> Iterator[None]:
    """A flip may make an opcode that asks for a table of gigabytes, which pickle fills."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**29, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


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
    """Save tensors of these dtypes with torch; returns the dtypes that are read."""
    import torch.distributed.checkpoint as dcp

    dcp.save({str(dtype): torch.zeros(2, dtype=dtype) for dtype in dtypes}, checkpoint_id=folder, no_dist=True)
    metadata = read_metadata(folder).state_dict_metadata
    return [metadata[str(dtype)].properties.dtype for dtype in dtypes]
