"""Rebalance partial rollouts over the engines: a paused group moves with the tokens generated so far."""

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from grpo_mp.batching.exchange import all_to_all
from grpo_mp.distributed.process_groups import all_gather
from grpo_mp.rollout.groups import LaunchedGroups, PausedGroup


def rebalance(carried: LaunchedGroups, works: bool, group: dist.ProcessGroup) -> LaunchedGroups:
    """Exchange paused groups so that each engine has equally many; return this rank's carried groups.

    `works`: this rank has a working engine. Finished groups and paused episodes stay.
    """
    own = {number: paused for number, paused in carried.items() if isinstance(paused, PausedGroup) and paused.outputs}
    by_rank = all_gather((works, sorted(own)), group)
    targets = plan_targets([numbers for _, numbers in by_rank], [has_engine for has_engine, _ in by_rank])
    if not targets:
        return carried
    outgoing = list[list[tuple[int, PausedGroup]]]([] for _ in by_rank)
    for number, paused in own.items():
        if number in targets:
            outgoing[targets[number]].append((number, paused))
    kept = {number: one for number, one in carried.items() if number not in targets}
    arrived = dict(all_to_all(outgoing, group))
    return {**kept, **arrived}


def plan_targets(numbers: Sequence[Sequence[int]], works: Sequence[bool]) -> Mapping[int, int]:
    """Return group number -> target rank for as few moves as possible.

    `numbers`: group numbers on each rank; `works`: whether the rank has a working engine. Each rank gives away the
    groups that it launched last, which have the fewest tokens.
    """
    engines = [rank for rank, has_engine in enumerate(works) if has_engine]
    if not engines:
        return {}
    least, more = divmod(sum(map(len, numbers)), len(engines))
    fullest = sorted(engines, key=lambda rank: (-len(numbers[rank]), rank))
    size = dict.fromkeys(range(len(numbers)), 0)
    size |= {rank: least + (place < more) for place, rank in enumerate(fullest)}
    surplus = sorted(number for rank, of_rank in enumerate(numbers) for number in sorted(of_rank)[size[rank] :])
    places = [rank for rank in engines for _ in range(size[rank] - len(numbers[rank]))]
    return dict(zip(surplus, places, strict=True))
