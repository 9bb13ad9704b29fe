"""Rewards to advantages, always by group id: uneven groups are legal, order means nothing. Float64 throughout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mp.algorithms.settings import Advantage

Steps = Sequence[tuple[int, float]]  # (index of a step's last token in the response, its reward)


@dataclass(frozen=True)
class Groups:
    """Which of `count` groups each value belongs to."""

    of: Tensor  # int64 [N]
    count: int

    @staticmethod
    def by_id(group_ids: Sequence[int]) -> "Groups":
        ids, of = torch.tensor(group_ids, dtype=torch.int64).unique(return_inverse=True)
        return Groups(of, len(ids))

    def sizes(self) -> Tensor:
        return self.sums(torch.ones(len(self.of), dtype=torch.float64))

    def sums(self, values: Tensor) -> Tensor:
        return torch.zeros(self.count, dtype=torch.float64).index_add(0, self.of, values)

    def differ(self, values: Tensor) -> Tensor:
        """bool [count]: does any value differ from another of its group?"""
        low = torch.full((self.count,), torch.inf, dtype=values.dtype).scatter_reduce(0, self.of, values, "amin")
        high = torch.full((self.count,), -torch.inf, dtype=values.dtype).scatter_reduce(0, self.of, values, "amax")
        return high > low


def outcome_advantages(rewards: Sequence[float], group_ids: Sequence[int], wanted: Advantage) -> tuple[float, ...]:
    """One advantage per sample from one reward per sample.

    group_mean: A_i = r_i - mean of its group (DeepSeekMath, section 4.1.2); leave_one_out: the mean of the others
    (RLOO, arXiv 2402.14740, eq. 8); none: A_i = r_i. Then divided by eps + the standard deviation, over n - 1 or n, of
    the group or of all rewards, or by nothing. With a group baseline, a group without difference gives exactly zero.
    """
    _check_lengths(rewards, group_ids)
    values, groups = torch.tensor(rewards, dtype=torch.float64), Groups.by_id(group_ids)
    centred = values - _baseline(values, groups, wanted.baseline)
    if wanted.scale == "group_std":
        centred = centred / (_group_std(values, groups, wanted.std)[groups.of] + wanted.eps)
    if wanted.scale == "batch_std":
        centred = centred / (_std(values, wanted.std) + wanted.eps)
    if wanted.baseline != "none":
        centred[~groups.differ(values)[groups.of]] = 0.0
    return tuple(centred.tolist())


def decoupled_advantages(
    parts: Sequence[Mapping[str, float]], weights: Mapping[str, float], group_ids: Sequence[int], wanted: Advantage
) -> tuple[float, ...]:
    """GDPO (arXiv 2601.05242, eq. 4 to 6): every reward normalised in its group, weighted, summed; then over the batch.

    `parts`: rewards of each sample by name; one that does not apply to a sample is not there and counts nothing.
    """
    _check_lengths(parts, group_ids)
    total = torch.zeros(len(parts), dtype=torch.float64)
    single_reward = Advantage(eps=wanted.eps, std=wanted.std)
    for name, weight in weights.items():
        applies = [i for i, part in enumerate(parts) if name in part]
        if applies:
            single = outcome_advantages(
                [parts[i][name] for i in applies], [group_ids[i] for i in applies], single_reward
            )
            total[applies] += weight * torch.tensor(single, dtype=torch.float64)
    if not bool((total != 0).any()):
        return (0.0,) * len(parts)
    return tuple(((total - total.mean()) / (_std(total, wanted.std) + wanted.eps)).tolist())


def process_advantages(
    steps: Sequence[Steps], response_tokens: Sequence[int], group_ids: Sequence[int], wanted: Advantage
) -> list[Tensor]:
    """[response tokens] of each sample: the sum of the normalised rewards of the steps that end at or after a token.

    Rewards are normalised over all steps of the group (DeepSeekMath, section 4.1.3); a group whose steps all have
    one reward gives zeros.
    """
    _check_lengths(steps, group_ids)
    owners = [i for i, of_sample in enumerate(steps) for _ in of_sample]
    rewards = [reward for of_sample in steps for _, reward in of_sample]
    flat = outcome_advantages(rewards, [group_ids[i] for i in owners], wanted)
    ends = [end for of_sample in steps for end, _ in of_sample]
    gains = [torch.zeros(tokens, dtype=torch.float64) for tokens in response_tokens]
    for owner, end, value in zip(owners, ends, flat, strict=True):
        gains[owner][end] += value
    return [gain.flip(0).cumsum(0).flip(0) for gain in gains]


def groups_without_difference(rewards: Sequence[float], group_ids: Sequence[int]) -> tuple[int, ...]:
    """Ids of the groups whose samples all have the same reward: they teach nothing."""
    groups = Groups.by_id(group_ids)
    same = ~groups.differ(torch.tensor(rewards, dtype=torch.float64))
    ids = sorted(set(group_ids))
    return tuple(ids[i] for i in same.nonzero()[:, 0].tolist())


def _baseline(values: Tensor, groups: Groups, kind: str) -> Tensor:
    if kind == "none":
        return torch.zeros_like(values)
    sums, sizes = groups.sums(values)[groups.of], groups.sizes()[groups.of]
    if kind == "leave_one_out":
        return (sums - values) / (sizes - 1).clamp(min=1)
    return sums / sizes


def _group_std(values: Tensor, groups: Groups, kind: str) -> Tensor:
    sizes = groups.sizes()
    centred = values - (groups.sums(values) / sizes)[groups.of]
    return (groups.sums(centred**2) / (sizes - int(kind == "sample")).clamp(min=1)).sqrt()


def _std(values: Tensor, kind: str) -> Tensor:
    return values.std(correction=int(kind == "sample")) if len(values) > 1 else torch.zeros((), dtype=values.dtype)


def _check_lengths(values: Sequence[object], group_ids: Sequence[int]) -> None:
    if len(values) != len(group_ids):
        raise ValueError(f"{len(values)} samples but {len(group_ids)} group ids")
