"""State of the optimizer in pieces: what is written, and what a wrong or damaged checkpoint says."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mp.config import check_settings
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.errors import UserError
from grpo_mp.examples.tiny_models import make_tiny, make_tokenizer
from grpo_mp.policy import optimizer_state
from grpo_mp.policy.checkpoint import load_policy, save_policy
from grpo_mp.policy.optimizer_state import load_optimizer_state, save_optimizer_state, state_chunks
from grpo_mp.policy.policy import Policy
from tests.planner.jobs import BASE


def make_policy(folder: Path, parallel: Parallel, **shape: Any) -> Policy:
    make_tiny(folder, "deepseek_v3", make_tokenizer(["apples"]), **({"num_hidden_layers": 2} | shape))
    return Policy(check_settings(BASE | {"model": {"path": folder}}, "test"), parallel, with_reference=False)


@pytest.fixture(scope="module")
def policy(parallel: Parallel, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    policy = make_policy(tmp_path_factory.mktemp("model"), parallel)
    for number, chunk in enumerate(state_chunks(policy)):
        chunk.tensor.copy_(torch.arange(chunk.tensor.numel()).view(chunk.tensor.shape) + number)
    return policy


def test_small_pieces_are_read_back_and_nothing_is_widened(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_state, "PIECE_BYTES", 4096)
    save_optimizer_state(policy, tmp_path)
    expected = {chunk.index: chunk.tensor.clone() for chunk in state_chunks(policy)}
    for chunk in state_chunks(policy):
        chunk.tensor.zero_()
    load_optimizer_state(policy, tmp_path)
    assert all(torch.equal(chunk.tensor, expected[chunk.index]) for chunk in state_chunks(policy))
    kept = sum(tensor.nbytes for tensor in expected.values())
    pieces = sum(-(-tensor.nbytes // 4096) for tensor in expected.values())
    written = sum(file.stat().st_size for file in (tmp_path / "optimizer").glob("*.distcp"))
    assert kept < written < kept + 4 * pieces * 2000  # torch's headers


def test_a_checkpoint_without_the_state_is_one_sentence(policy: Policy, tmp_path: Path) -> None:
    save_policy(policy, tmp_path)
    shutil.rmtree(tmp_path / "optimizer")
    with pytest.raises(UserError, match=r"optimizer/.metadata: No such file or directory: copy it again$"):
        load_policy(policy, tmp_path)


def test_a_damaged_index_is_one_sentence(policy: Policy, tmp_path: Path) -> None:
    save_optimizer_state(policy, tmp_path)
    (tmp_path / "optimizer" / ".metadata").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"optimizer/.metadata is damaged"):
        load_optimizer_state(policy, tmp_path)


def test_another_model_is_one_sentence(policy: Policy, parallel: Parallel, tmp_path: Path) -> None:
    save_optimizer_state(policy, tmp_path)
    other = make_policy(tmp_path / "other", parallel, hidden_size=64)
    with pytest.raises(UserError, match=r"^\S+: the checkpoint lacks \S+ \[.*\] or a part of it: it is another model"):
        load_optimizer_state(other, tmp_path)


def test_a_full_disk_is_one_sentence(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.FileSystemWriter.write_data", full)
    with pytest.raises(UserError, match=r"the checkpoint cannot be written \(rank 0\): .*No space left on device"):
        save_optimizer_state(policy, tmp_path)
