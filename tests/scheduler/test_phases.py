"""The moves between all pairs of residencies, carried out on a set."""

from dataclasses import fields
from itertools import product

import pytest

from grpo_mp.scheduler.phases import RESIDENT, Move, Phase, Residency, moves

NAMES = [field.name for field in fields(Residency)]
ALL = [Residency(*held) for held in product((False, True), repeat=len(NAMES))]


def names(residency: Residency) -> set[str]:
    return {name for name in NAMES if getattr(residency, name)}


@pytest.mark.parametrize("now", [*ALL, *RESIDENT.values()])
def test_moves_end_where_wanted_and_make_room_first(now: Residency) -> None:
    for wanted in ALL:
        held = names(now)
        planned = moves(now, wanted)
        for move in planned:
            assert (move.what in held) != move.wake
            (held.add if move.wake else held.remove)(move.what)
        assert held == names(wanted)
        assert [move.wake for move in planned] == sorted(move.wake for move in planned)
        assert len({move.what for move in planned}) == len(planned)


def test_every_phase_says_what_is_resident() -> None:
    assert set(RESIDENT) == set(Phase)
    assert all(names(residency) for residency in RESIDENT.values())


def test_policy_and_engine_share_the_device_only_while_weights_go_over() -> None:
    for phase, residency in RESIDENT.items():
        of_policy = {name for name in names(residency) if not name.startswith("engine_")}
        assert phase is Phase.SYNC or not (of_policy and residency.engine_weights)
        assert not (residency.engine_cache and of_policy)
        assert residency.engine_weights or not residency.engine_cache
        assert residency.policy_weights or not residency.gradients


def test_train_to_sync_to_generate_by_hand() -> None:
    assert moves(RESIDENT[Phase.TRAIN], RESIDENT[Phase.SYNC]) == (
        Move("gradients", wake=False),
        Move("optimizer", wake=False),
        Move("engine_weights", wake=True),
    )
    assert moves(RESIDENT[Phase.SYNC], RESIDENT[Phase.GENERATE]) == (
        Move("policy_weights", wake=False),
        Move("engine_cache", wake=True),
    )
    assert moves(RESIDENT[Phase.GENERATE], RESIDENT[Phase.EVAL]) == ()
