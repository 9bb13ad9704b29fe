"""Checkpoints that are written while training goes on: what they hold, when they count, what their errors say."""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from grpo_mp.checkpoint import chunk_files
from grpo_mp.checkpoint.chunk_files import ChunkWriter, WrittenChunks
from grpo_mp.checkpoint.hf_reader import HfReader
from grpo_mp.checkpoint.run_state import MANIFEST, TrainState, checkpoint_folder, latest_checkpoint, read_manifest
from grpo_mp.config import load_settings
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.platform.pinned import PinnedBuffer
from grpo_mp.policy.checkpoint import local_weight_chunks, optimizer_chunks
from grpo_mp.policy.policy import Policy
from grpo_mp.trainer.job import build_policy
from grpo_mp.trainer.loop import PolicyContext
from grpo_mp.trainer.save import CheckpointSaver
from grpo_mp.utils.errors import DiskError
from tests.conftest import TinyRun
from tests.trainer.one_step import OneStep, make_batch
from tests.trainer.test_update import SETTINGS, groups

LIMIT_S = 60.0


class Gate:
    """Holds back the writing of `folders`, of optimizer state at first, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.folders = {"optimizer"}
        write = ChunkWriter.write

        def write_once_opened(writer: ChunkWriter) -> WrittenChunks:
            if writer.folder.name in self.folders:
                assert self.opened.wait(LIMIT_S)
            return write(writer)

        monkeypatch.setattr(ChunkWriter, "write", write_once_opened)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def make_trainer(tiny_run: TinyRun, parallel: Parallel, run: Path, *overrides: str) -> OneStep:
    """A trainer after one update, with a reference that differs from its policy."""
    settings = load_settings(tiny_run.config, [*SETTINGS, "algorithm.kl.coef=0.1", f"run.folder={run}", *overrides])
    policy = Policy(settings, parallel, with_reference=settings.algorithm.kl.coef > 0)
    trainer = OneStep(settings, policy, make_batch(settings, parallel, groups()))
    trainer.train(trainer.compute_logprobs())
    return trainer


def saver_of(trainer: OneStep, weights_stay: bool = False) -> CheckpointSaver:
    return CheckpointSaver(trainer.settings.run, trainer.policy, LIMIT_S, weights_stay)


def state_of(policy: Policy) -> dict[tuple[str, tuple[int, ...]], torch.Tensor]:
    chunks = [*local_weight_chunks(policy, policy.tensors), *optimizer_chunks(policy)]
    return {(chunk.name, chunk.offsets): chunk.tensor.clone() for chunk in chunks}


def count_hf_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the tensors that will be read from Hugging Face folders."""
    names = list[str]()
    read = HfReader.read

    def counted(reader: HfReader, name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        names.append(name)
        return read(reader, name, *args, **kwargs)

    monkeypatch.setattr(HfReader, "read", counted)
    return names


@pytest.mark.parametrize("reference_updated", [False, True])
def test_a_checkpoint_is_the_state_of_its_step_though_training_goes_on(
    tiny_run: TinyRun,
    parallel: Parallel,
    tmp_path: Path,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    reference_updated: bool,
) -> None:
    trainer = make_trainer(tiny_run, parallel, tmp_path)
    expected = state_of(trainer.policy)
    state = TrainState(step=1, adaptive_coefs={"kl": 0.1}, reference_updated=reference_updated)
    written = asdict(state)
    with saver_of(trainer) as saver:
        saver.save(state)
        assert latest_checkpoint(tmp_path) is None
        updates = trainer.compute_logprobs()  # the reference is swapped with the weights
        state.adaptive_coefs["kl"] = 0.2
        gate.opened.set()
        saver.finish()
        trainer.train(updates)
    folder = latest_checkpoint(tmp_path)
    assert folder == checkpoint_folder(tmp_path, 1)
    assert asdict(read_manifest(folder)) == written
    state = TrainState(step=1, reference_updated=reference_updated)
    read = count_hf_reads(monkeypatch)
    loaded = state_of(build_policy(trainer.settings, parallel, state, folder, with_reference=True))
    assert bool(read) == (not reference_updated)  # the reference alone is still what the model's folder holds
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    later = state_of(trainer.policy)
    assert not any(torch.equal(later[name], tensor) for name, tensor in expected.items() if "exp_avg/" in name[0])


def test_weights_that_nothing_swaps_or_moves_are_written_beside_the_run(
    tiny_run: TinyRun, parallel: Parallel, tmp_path: Path, gate: Gate
) -> None:
    trainer = make_trainer(tiny_run, parallel, tmp_path, "algorithm.kl.coef=0.0")
    expected = state_of(trainer.policy)
    gate.folders.add("policy")
    with saver_of(trainer, weights_stay=True) as saver:
        saver.save(TrainState(step=1))
        updates = trainer.compute_logprobs()
        assert list(checkpoint_folder(tmp_path, 1).rglob("*.bin")) == []
        gate.opened.set()
        saver.finish()
        trainer.train(updates)
    folder = latest_checkpoint(tmp_path)
    assert folder == checkpoint_folder(tmp_path, 1)
    loaded = state_of(build_policy(trainer.settings, parallel, TrainState(step=1), folder))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_a_save_has_one_piece_of_pinned_memory_at_a_time(
    tiny_run: TinyRun, parallel: Parallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where weights and state, and a reference, are written from it."""
    buffers: list[weakref.ref[PinnedBuffer]] = []

    def watched(like: Sequence[torch.Tensor]) -> PinnedBuffer:
        assert not any(buffer() for buffer in buffers)
        buffer = PinnedBuffer(like)
        buffers.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr(chunk_files, "PinnedBuffer", watched)
    trainer = make_trainer(tiny_run, parallel, tmp_path)
    with saver_of(trainer) as saver:
        saver.save(TrainState(step=1, reference_updated=True))
    assert len(buffers) == 3


def test_the_next_save_waits_for_the_last(tiny_run: TinyRun, parallel: Parallel, tmp_path: Path, gate: Gate) -> None:
    trainer = make_trainer(tiny_run, parallel, tmp_path)
    with saver_of(trainer) as saver:
        saver.save(TrainState(step=1))
        threading.Timer(0.2, gate.opened.set).start()
        saver.save(TrainState(step=2))
        assert (checkpoint_folder(tmp_path, 1) / MANIFEST).is_file()
    assert {folder.name for folder in (tmp_path / "checkpoints").iterdir()} == {"step_000001", "step_000002"}
    assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 2)


def test_training_is_the_same_with_and_without(tiny_run: TinyRun, parallel: Parallel, tmp_path: Path) -> None:
    reports = []
    files = []
    for beside in (True, False):
        run = tmp_path / str(beside)
        trainer = make_trainer(tiny_run, parallel, run)
        with saver_of(trainer) as saver:
            for step in (1, 2, 3):
                saver.save(TrainState(step=step))
                if not beside:
                    saver.finish()
                updates = trainer.compute_logprobs()
                saver.finish()
                reports.append([asdict(report) for report in trainer.train(updates)])
        folder = checkpoint_folder(run, 3)
        files.append({file.relative_to(folder): file.read_bytes() for file in folder.rglob("*.bin")})
    assert reports[:3] == reports[3:]
    assert files[0] == files[1]
    assert len(files[0]) == 2


def fail(*_: Any) -> memoryview:
    raise OSError(28, "No space left on device")


def test_errors_in_the_background_end_the_run_and_leave_the_former_checkpoint(
    tiny_run: TinyRun, parallel: Parallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    trainer = make_trainer(tiny_run, parallel, tmp_path)
    gate.opened.set()
    with saver_of(trainer) as saver:
        saver.save(TrainState(step=1))
        saver.finish()
        gate.opened.clear()
        saver.save(TrainState(step=2))  # weights are written
        monkeypatch.setattr(chunk_files, "memory_of", fail)
        gate.opened.set()
        with pytest.raises(DiskError, match=r"step_000002 cannot be written \(rank 0\): .*No space .*; make room"):
            saver.save(TrainState(step=3))
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]
    assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 1)


def test_a_run_that_fails_completes_its_last_checkpoint(
    tiny_run: TinyRun, parallel: Parallel, tmp_path: Path, gate: Gate
) -> None:
    trainer = make_trainer(tiny_run, parallel, tmp_path)

    def fail_after_save() -> None:
        with saver_of(trainer) as saver:
            saver.save(TrainState(step=1))
            threading.Timer(0.2, gate.opened.set).start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_after_save()
    assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 1)


def context_of(first_step: int = 0, **parts: Any) -> PolicyContext:
    """A context that logs and reports nothing."""
    ctx: Any = object.__new__(PolicyContext)
    logger = SimpleNamespace(flush=lambda: None, close=lambda: None)
    vars(ctx).update(parts, _logger=logger, _first_step=first_step)
    return cast(PolicyContext, ctx)


def test_a_run_that_is_stopped_behind_its_last_save_saves_again(
    tiny_run: TinyRun, parallel: Parallel, tmp_path: Path
) -> None:
    def nothing(*_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    trainer = make_trainer(tiny_run, parallel, tmp_path)
    with saver_of(trainer) as saver:
        parts: dict[str, Any] = {
            "saver": saver,
            "settings": trainer.settings,
            "state": TrainState(step=2),
            "phases": SimpleNamespace(phase=nothing),
            "timeline": SimpleNamespace(span=nothing),
        }
        context_of(2, **parts).end()  # it was stopped before its first step
        assert latest_checkpoint(tmp_path) is None
        context_of(**parts).end()
        assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 2)
        written = (checkpoint_folder(tmp_path, 2) / MANIFEST).stat().st_mtime_ns
        context_of(**parts).end()  # it is whole
        assert (checkpoint_folder(tmp_path, 2) / MANIFEST).stat().st_mtime_ns == written
