"""A rank's phases with recording movers and the real monitors."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from grpo_mp.errors import UserError
from grpo_mp.monitor.progress import Progress
from grpo_mp.monitor.timeline import Timeline
from grpo_mp.monitor.watchdog import Watchdog
from grpo_mp.scheduler.phase_manager import OffloadFunction, PhaseManager
from grpo_mp.scheduler.phases import GENERATING, RESIDENT, Phase, Residency

ORDER = (Phase.GENERATE, Phase.LOGPROB, Phase.TRAIN, Phase.SYNC, Phase.GENERATE, Phase.SAVE)
Monitors = tuple[Timeline, Watchdog, Progress]


@pytest.fixture
def monitors(tmp_path: Path) -> Iterator[Monitors]:
    timeline = Timeline(tmp_path, rank=0)
    with Watchdog(0, tmp_path) as watchdog:
        yield timeline, watchdog, Progress(tmp_path, steps=1, console=Console(quiet=True))
    timeline.close()


def recording(calls: list[str]) -> dict[str, OffloadFunction]:
    def mover(name: str) -> OffloadFunction:
        return lambda wake: calls.append(f"{'+' if wake else '-'}{name}")

    return {name: mover(name) for name in vars(Residency())}


def test_movers_run_before_the_body_and_leave_before_they_come(monitors: Monitors) -> None:
    calls: list[str] = []
    scheduler = PhaseManager(*monitors, 60.0, recording(calls), GENERATING)
    for phase in ORDER:
        with scheduler.phase(phase):
            calls.append(phase)
    assert " ".join(calls) == (
        "GENERATE "
        "-engine_weights -engine_cache +policy_weights LOGPROB "
        "+gradients +optimizer TRAIN "
        "-gradients -optimizer +engine_weights SYNC "
        "-policy_weights +engine_cache GENERATE "
        "-engine_weights -engine_cache +policy_weights +optimizer SAVE"
    )


def test_inside_each_phase_what_it_needs_is_resident(monitors: Monitors) -> None:
    resident: dict[str, bool] = dict.fromkeys(vars(Residency()), False)
    movers: dict[str, OffloadFunction] = {
        name: lambda wake, name=name: resident.update({name: wake}) for name in resident
    }
    scheduler = PhaseManager(*monitors, 60.0, movers)
    for one in Phase:
        for other in Phase:
            for phase in (one, other):
                with scheduler.phase(phase):
                    assert resident == vars(RESIDENT[phase])


def test_without_movers_nothing_moves(monitors: Monitors) -> None:
    scheduler = PhaseManager(*monitors, 60.0)
    for phase in ORDER:
        with scheduler.phase(phase):
            pass
    assert {span.name for span in monitors[0].take()} == set(ORDER)


def test_spans_and_footprints_by_phase(monitors: Monitors) -> None:
    scheduler = PhaseManager(*monitors, 60.0, recording([]))
    with scheduler.phase(Phase.TRAIN), scheduler.waiting():
        pass
    with scheduler.phase(Phase.EVAL, "arithmetic"):
        pass
    spans = monitors[0].take()
    assert [span.name for span in spans] == ["MOVE", "WAIT", "TRAIN", "MOVE", "EVAL"]
    assert set(scheduler.ledger.take()) == {"TRAIN", "EVAL"}


def test_an_error_in_a_phase_comes_out_and_the_next_phase_starts_from_there(monitors: Monitors) -> None:
    calls: list[str] = []
    scheduler = PhaseManager(*monitors, 60.0, recording(calls), GENERATING)
    with pytest.raises(RuntimeError, match="in the body"), scheduler.phase(Phase.LOGPROB):
        raise RuntimeError("in the body")
    calls.clear()
    with scheduler.phase(Phase.GENERATE):
        pass
    assert calls == ["-policy_weights", "+engine_weights", "+engine_cache"]


def test_out_of_memory_is_one_sentence_with_phase_items_and_cure(monitors: Monitors) -> None:
    items = {"weights": 20.5 * 2**30, "gradients": 41 * 2**30, "optimizer": 0.0}
    scheduler = PhaseManager(*monitors, 60.0, items=lambda: items)
    words = r"^rank 0 in TRAIN: out of device memory; it holds gradients 41\.0 GiB, weights 20\.5 GiB: lower optimizer"
    with pytest.raises(UserError, match=words), scheduler.phase(Phase.TRAIN):
        raise torch.OutOfMemoryError("CUDA out of memory")
    movers: dict[str, OffloadFunction] = dict.fromkeys(vars(Residency()), _full)
    scheduler = PhaseManager(*monitors, 60.0, movers)
    with pytest.raises(UserError, match=r"in SYNC: .* nothing of this rank: lower sync"), scheduler.phase(Phase.SYNC):
        pass


def _full(wake: bool) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")
