"""A policy in pieces: what is written, what is read, and what a wrong or damaged checkpoint says."""

import shutil
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mp.checkpoint.chunk_files import TensorChunk, read_index
from grpo_mp.config import check_settings
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.policy.checkpoint import load_policy, local_weight_chunks, on_all_ranks, optimizer_chunks
from grpo_mp.policy.policy import Policy
from grpo_mp.utils.errors import UserError
from tests.checkpoint.helpers import malicious_pickle
from tests.planner.jobs import BASE
from tests.save_policy import save_policy
from tools.tiny.models import make_tiny, make_tokenizer


def make_policy(folder: Path, parallel: Parallel, lora: dict[str, float] | None = None, **shape: Any) -> Policy:
    make_tiny(folder, "deepseek_v3", make_tokenizer(["apples"]), **({"num_hidden_layers": 2} | shape))
    model = {"path": folder, "lora": lora}
    return Policy(check_settings(BASE | {"model": model}, "test"), parallel, with_reference=False)


def all_chunks(policy: Policy) -> list[TensorChunk]:
    return [*local_weight_chunks(policy, policy.tensors), *optimizer_chunks(policy)]


@pytest.fixture(scope="module")
def policy(parallel: Parallel, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    policy = make_policy(tmp_path_factory.mktemp("model"), parallel)
    for number, chunk in enumerate(all_chunks(policy)):
        chunk.tensor.copy_(torch.arange(chunk.tensor.numel()).view(chunk.tensor.shape) + number)
    return policy


@pytest.fixture(scope="module")
def saved(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_policy(policy, folder)
    return folder


def test_small_pieces_are_read_back_and_nothing_is_widened(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_mp.checkpoint.chunk_files.PIECE_BYTES", 4096)
    save_policy(policy, tmp_path)
    chunks = all_chunks(policy)
    expected = [chunk.tensor.clone() for chunk in chunks]
    for chunk in chunks:
        chunk.tensor.zero_()
    load_policy(policy, tmp_path)
    assert all(torch.equal(chunk.tensor, before) for chunk, before in zip(chunks, expected, strict=True))
    kept = sum(tensor.nbytes for tensor in expected)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.bin")) == kept
    stored = [tensor for folder in (tmp_path, tmp_path / "optimizer") for tensor in read_index(folder).values()]
    sizes = [prod(piece.sizes) * tensor.dtype.itemsize for tensor in stored for piece in tensor.pieces]
    assert max(sizes) <= 4096


@pytest.mark.parametrize("content", [b"nothing", None])
def test_a_damaged_schedule_is_one_sentence(content: bytes | None, policy: Policy, saved: Path, tmp_path: Path) -> None:
    file = shutil.copytree(saved, tmp_path, dirs_exist_ok=True) / "common.pt"
    file.write_bytes(malicious_pickle(tmp_path / "ran") if content is None else content)
    with pytest.raises(UserError, match=r"^\S+common.pt: the checkpoint cannot be read: "):
        load_policy(policy, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_the_learning_rate_is_that_of_the_settings_not_of_the_checkpoint(
    saved: Path, parallel: Parallel, tmp_path: Path
) -> None:
    make_tiny(tmp_path, "deepseek_v3", make_tokenizer(["apples"]), num_hidden_layers=2)
    tree = BASE | {"model": {"path": tmp_path}, "optimizer": {"lr": 3e-4, "min_lr": 1e-5, "lr_schedule": "linear"}}
    other = Policy(check_settings(tree, "test"), parallel, with_reference=False)
    load_policy(other, saved)
    groups = [group for part in other.optimizer.chained_optimizers for group in part.param_groups]
    assert {group["lr"] for group in groups} == {3e-4}  # no update is done
    assert {(group["max_lr"], group["min_lr"]) for group in groups} == {(3e-4, 1e-5)}


def test_another_model_is_one_sentence(saved: Path, parallel: Parallel, tmp_path: Path) -> None:
    other = make_policy(tmp_path / "other", parallel, hidden_size=64)
    with pytest.raises(UserError, match=r"^\S+: the checkpoint lacks \S+ \[.*\] or a part of it: it is another model"):
        load_policy(other, saved)


def test_what_is_no_error_of_the_disk_is_raised_as_itself(parallel: Parallel, tmp_path: Path) -> None:
    """On its own rank; the others, which wait in the same gather, raise the sentence."""

    def fail(error: Exception) -> None:
        raise error

    for error in (ZeroDivisionError(), RuntimeError("CUDA out of memory")):
        with pytest.raises(type(error), match=f"^{error}$"):
            on_all_ranks(lambda: fail(error), tmp_path, parallel.cpu_group)  # noqa: B023 - called at once
    with pytest.raises(UserError, match=r"cannot be written \(rank 0\): TimeoutError$"):
        on_all_ranks(lambda: fail(TimeoutError()), tmp_path, parallel.cpu_group)
    with pytest.raises(UserError, match=r"cannot be written \(rank 0\): full"):
        on_all_ranks(lambda: fail(OSError("full")), tmp_path, parallel.cpu_group)


def test_a_checkpoint_of_other_adapters_is_refused(parallel: Parallel, tmp_path: Path) -> None:
    make_tiny(tmp_path / "base", "qwen3", make_tokenizer(["apples"]), num_hidden_layers=1)
    (tmp_path / "saved").mkdir()
    tree = BASE | {"model": {"path": tmp_path / "base", "lora": {"rank": 2, "alpha": 4.0}}}
    save_policy(Policy(check_settings(tree, "test"), parallel, with_reference=False), tmp_path / "saved")
    load_policy(Policy(check_settings(tree, "test"), parallel, with_reference=False), tmp_path / "saved")
    fewer = tree | {
        "model": tree["model"] | {"lora": {"rank": 2, "alpha": 4.0, "target_modules": ["q_proj", "o_proj"]}}
    }
    scaled = tree | {"model": tree["model"] | {"lora": {"rank": 2, "alpha": 8.0}}}
    for changed, words in ((fewer, "of rank 2 and alpha 4 on o_proj q_proj"), (scaled, "of rank 2 and alpha 8 on all")):
        policy = Policy(check_settings(changed, "test"), parallel, with_reference=False)
        with pytest.raises(
            UserError, match=rf"adapters are of rank 2 and alpha 4 on all-linear, the adapters of model.lora {words}"
        ):
            load_policy(policy, tmp_path / "saved")
