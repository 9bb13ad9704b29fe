"""The moves between all pairs of residencies, applied to a set."""

from dataclasses import fields
from itertools import product

from grpo_mp.trainer.phase_manager import plan_moves
from grpo_mp.utils.phases import Phase, Residency

NAMES = [field.name for field in fields(Residency)]
RESIDENCIES = [Residency(*flags) for flags in product((False, True), repeat=len(NAMES))]


def names(residency: Residency) -> set[str]:
    return {name for name in NAMES if getattr(residency, name)}


def test_moves_end_at_the_target_and_make_room_first() -> None:
    for current, target in product(RESIDENCIES, RESIDENCIES):
        resident = names(current)
        moves = plan_moves(current, target)
        for item, onload in moves:
            assert (item in resident) != onload
            (resident.add if onload else resident.remove)(item)
        assert resident == names(target)
        assert [onload for _, onload in moves] == sorted(onload for _, onload in moves)
        assert len({item for item, _ in moves}) == len(moves)


def test_policy_and_engine_share_the_device_only_during_sync_and_save() -> None:
    for phase in Phase:
        residency = phase.resident
        of_policy = {name for name in names(residency) if not name.startswith("engine_")}
        assert phase in (Phase.SYNC, Phase.SAVE) or not (of_policy and residency.engine_weights)
        assert not (residency.engine_cache and of_policy)
        assert residency.engine_weights or not residency.engine_cache
        assert residency.policy_weights or not residency.gradients
        assert not residency.reward_model or names(residency) == {"reward_model"}
