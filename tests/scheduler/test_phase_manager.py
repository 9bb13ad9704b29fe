"""A rank's phases with offload functions that record their calls, and the real monitors."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from grpo_mp import platform
from grpo_mp.monitor.progress import Progress
from grpo_mp.monitor.timeline import Timeline
from grpo_mp.monitor.watchdog import Watchdog
from grpo_mp.trainer.phase_manager import MemoryTracker, MemoryUsage, OffloadFunction, PhaseManager
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.phases import GENERATION, Phase, Residency

ORDER = (Phase.GENERATE, Phase.LOGPROB, Phase.TRAIN, Phase.SYNC, Phase.GENERATE, Phase.SAVE)
Monitors = tuple[Timeline, Watchdog, Progress]


@pytest.fixture
def monitors(tmp_path: Path) -> Iterator[Monitors]:
    timeline = Timeline(tmp_path, rank=0)
    with Watchdog(0, tmp_path) as watchdog:
        yield timeline, watchdog, Progress(tmp_path, steps=1, console=Console(quiet=True))
    timeline.close()


def recording_functions(calls: list[str]) -> dict[str, OffloadFunction]:
    def record(name: str) -> OffloadFunction:
        return lambda onload: calls.append(f"{'+' if onload else '-'}{name}")

    return {name: record(name) for name in vars(Residency())}


def test_offloads_run_before_onloads_and_before_the_body(monitors: Monitors) -> None:
    calls: list[str] = []
    phase_manager = PhaseManager(*monitors, 60.0, recording_functions(calls), GENERATION)
    for phase in ORDER:
        with phase_manager.phase(phase):
            calls.append(phase)
    assert " ".join(calls) == (
        "GENERATE "
        "-engine_weights -engine_cache +communicators +policy_weights LOGPROB "
        "+gradients +optimizer TRAIN "
        "-gradients -optimizer +engine_weights SYNC "
        "-communicators -policy_weights +engine_cache GENERATE "
        "-engine_cache +communicators +policy_weights SAVE"
    )


def test_each_phase_has_its_residency(monitors: Monitors) -> None:
    resident: dict[str, bool] = dict.fromkeys(vars(Residency()), False)
    offload_functions: dict[str, OffloadFunction] = {
        name: lambda onload, name=name: resident.update({name: onload}) for name in resident
    }
    phase_manager = PhaseManager(*monitors, 60.0, offload_functions)
    for first in Phase:
        for second in Phase:
            for phase in (first, second):
                with phase_manager.phase(phase):
                    assert resident == vars(phase.resident)


def test_an_engine_keeps_its_weights_until_the_next_ones_come(monitors: Monitors) -> None:
    """What it gives up comes back undefined: between a sync and the phases that generate by it nothing may take it."""
    after_sync = [Phase.CHECK, Phase.EVAL, Phase.SAVE, Phase.GENERATE]
    calls: list[str] = []
    phase_manager = PhaseManager(*monitors, 60.0, recording_functions(calls), GENERATION)
    for last in after_sync:
        for second in after_sync:
            with phase_manager.phase(Phase.SYNC):
                calls.clear()
            for phase in (second, last):
                with phase_manager.phase(phase):
                    assert "-engine_weights" not in calls


def test_communicators_are_in_use_when_the_job_ends(monitors: Monitors) -> None:
    calls: list[str] = []
    phase_manager = PhaseManager(*monitors, 60.0, recording_functions(calls), GENERATION)
    phase_manager.end()
    assert calls == ["-engine_weights", "-engine_cache", "+communicators"]
    calls.clear()
    phase_manager.end()
    assert not calls


def test_spans_and_memory_usage_by_phase(monitors: Monitors) -> None:
    phase_manager = PhaseManager(*monitors, 60.0, recording_functions([]))
    with phase_manager.phase(Phase.TRAIN), phase_manager.waiting():
        pass
    with phase_manager.phase(Phase.EVAL, "arithmetic"):
        pass
    spans = monitors[0].take()
    assert [span.name for span in spans] == ["MOVE", "WAIT", "TRAIN", "MOVE", "EVAL"]
    assert set(phase_manager.memory_tracker.take()) == {"TRAIN", "EVAL"}


def test_out_of_memory_is_one_sentence_with_phase_items_and_advice(monitors: Monitors) -> None:
    items = {"weights": 20.5 * 2**30, "gradients": 41 * 2**30, "optimizer": 0.0}
    manager = PhaseManager(*monitors, 60.0, items=lambda: items)
    error = r"^rank 0 in TRAIN: out of device memory; it holds gradients 41\.0 GiB, weights 20\.5 GiB: lower training"
    with pytest.raises(UserError, match=error), manager.phase(Phase.TRAIN):
        raise torch.OutOfMemoryError("CUDA out of memory")
    offload_functions: dict[str, OffloadFunction] = dict.fromkeys(vars(Residency()), out_of_memory)
    manager = PhaseManager(*monitors, 60.0, offload_functions)
    with (
        pytest.raises(UserError, match=r"in SYNC: .* nothing of this rank: lower sync"),
        manager.phase(Phase.SYNC),
    ):
        pass


def out_of_memory(onload: bool) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_the_largest_of_a_phase_is_kept_until_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: Iterator[int] = iter([30, 10, 20, 5])
    monkeypatch.setattr(platform, "host_bytes", lambda: next(hosts))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3)
    tracker = MemoryTracker()
    for phase in ("TRAIN", "TRAIN", "GENERATE"):
        tracker.end(phase)
    assert tracker.take() == {"TRAIN": MemoryUsage(30, 2, 3), "GENERATE": MemoryUsage(20, 2, 3)}
    assert tracker.take() == {}
    tracker.end("TRAIN")
    assert tracker.take() == {"TRAIN": MemoryUsage(5, 2, 3)}


def test_policy_and_engine_share_the_device_only_during_sync_and_save() -> None:
    for phase in Phase:
        residency = phase.resident
        names = {name for name, there in vars(residency).items() if there}
        of_policy = {name for name in names if not name.startswith("engine_")}
        assert phase in (Phase.SYNC, Phase.SAVE) or not (of_policy and residency.engine_weights)
        assert not (residency.engine_cache and of_policy)
        assert residency.engine_weights or not residency.engine_cache
        assert residency.policy_weights or not residency.gradients
        assert not residency.reward_model or names == {"reward_model"}
