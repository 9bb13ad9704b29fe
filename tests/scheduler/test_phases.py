"""The moves between all pairs of residencies, applied to a set."""

from dataclasses import fields
from itertools import product

import pytest

from grpo_mp.trainer.phase_manager import plan_moves
from grpo_mp.utils.phases import Phase, Residency

NAMES = [field.name for field in fields(Residency)]
RESIDENCIES = [Residency(*flags) for flags in product((False, True), repeat=len(NAMES))]


def names(residency: Residency) -> set[str]:
    return {name for name in NAMES if getattr(residency, name)}


@pytest.mark.parametrize("current", [*RESIDENCIES, *(phase.resident for phase in Phase)])
def test_moves_end_at_the_target_and_make_room_first(current: Residency) -> None:
    for target in RESIDENCIES:
        resident = names(current)
        moves = plan_moves(current, target)
        for item, onload in moves:
            assert (item in resident) != onload
            (resident.add if onload else resident.remove)(item)
        assert resident == names(target)
        assert [onload for _, onload in moves] == sorted(onload for _, onload in moves)
        assert len({item for item, _ in moves}) == len(moves)


def test_every_phase_has_a_description_and_something_resident() -> None:
    assert all(names(phase.resident) for phase in Phase)
    assert all(phase.description for phase in Phase)


def test_policy_and_engine_share_the_device_only_during_sync_and_save() -> None:
    for phase in Phase:
        residency = phase.resident
        of_policy = {name for name in names(residency) if not name.startswith("engine_")}
        assert phase in (Phase.SYNC, Phase.SAVE) or not (of_policy and residency.engine_weights)
        assert not (residency.engine_cache and of_policy)
        assert residency.engine_weights or not residency.engine_cache
        assert residency.policy_weights or not residency.gradients
        assert not residency.reward_model or names(residency) == {"reward_model"}


def test_train_to_sync_to_generate_by_hand() -> None:
    assert plan_moves(Phase.TRAIN.resident, Phase.SYNC.resident) == [
        ("gradients", False),
        ("optimizer", False),
        ("engine_weights", True),
    ]
    assert plan_moves(Phase.SYNC.resident, Phase.GENERATE.resident) == [
        ("communicators", False),
        ("policy_weights", False),
        ("engine_cache", True),
    ]
    assert plan_moves(Phase.GENERATE.resident, Phase.LOGPROB.resident) == [
        ("engine_weights", False),
        ("engine_cache", False),
        ("communicators", True),
        ("policy_weights", True),
    ]
    assert plan_moves(Phase.GENERATE.resident, Phase.EVAL.resident) == []


def test_a_reward_model_is_there_between_engine_and_policy() -> None:
    assert plan_moves(Phase.GENERATE.resident, Phase.SCORE.resident) == [
        ("engine_weights", False),
        ("engine_cache", False),
        ("reward_model", True),
    ]
    assert plan_moves(Phase.SCORE.resident, Phase.LOGPROB.resident) == [
        ("reward_model", False),
        ("communicators", True),
        ("policy_weights", True),
    ]
