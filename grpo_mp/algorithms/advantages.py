"""Rewards to advantages, by group id: groups may differ in size, order does not matter. Float64 throughout."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from grpo_mp.algorithms.registries import ADVANTAGE_ESTIMATORS
from grpo_mp.algorithms.settings import AdvantageConfig
from grpo_mp.errors import UserError
from grpo_mp.types import PerToken, SampleInfo

Steps = Sequence[tuple[int, float]]  # (index of a step's last token in the response, its reward)


class AdvantageEstimator(Protocol):
    """Returns the advantage of each of the step's samples: a number, or [response tokens].

    `samples`: all of the step, alike on every rank, groups by `group_id`; `advantage`: that section of the settings;
    `weights`: of the parts of the reward, by name. `algorithm.advantage.args` come by name.
    """

    def __call__(
        self, samples: Sequence[SampleInfo], advantage: AdvantageConfig, weights: Mapping[str, float], /
    ) -> Sequence[PerToken]: ...


def load_estimator(advantage: AdvantageConfig) -> AdvantageEstimator:
    """Return the estimator that the settings name. Raises UserError where a user's own cannot be loaded."""
    name = advantage.estimator or advantage.built_in
    return ADVANTAGE_ESTIMATORS.resolve(name, "algorithm.advantage.estimator", advantage.args)


def estimate_advantages(
    estimator: AdvantageEstimator,
    samples: Sequence[SampleInfo],
    advantage: AdvantageConfig,
    weights: Mapping[str, float],
) -> list[PerToken]:
    """Call an estimator. Raises UserError where it does not return a finite advantage for each sample."""
    label = f"algorithm.advantage.estimator {advantage.estimator or advantage.built_in!r}"
    advantages = list(estimator(samples, advantage, weights))
    if len(advantages) != len(samples):
        raise UserError(f"{label} returned {len(advantages)} advantages for {len(samples)} samples")
    for sample, values in zip(samples, advantages, strict=True):
        tensor = torch.as_tensor(values)
        if tensor.shape not in ((), (sample.response_tokens,)) or not bool(tensor.isfinite().all()):
            raise UserError(
                f"{label}: the advantage of sample {sample.key} has shape {list(tensor.shape)} or is not finite: "
                f"return a number or [{sample.response_tokens}], one for each response token"
            )
    return advantages


def estimate_outcome(
    samples: Sequence[SampleInfo], advantage: AdvantageConfig, weights: Mapping[str, float]
) -> Sequence[PerToken]:
    """Compute `outcome_advantages` of the rewards."""
    return outcome_advantages([sample.reward for sample in samples], _group_ids(samples), advantage)


def estimate_decoupled(
    samples: Sequence[SampleInfo], advantage: AdvantageConfig, weights: Mapping[str, float]
) -> Sequence[PerToken]:
    """Compute `decoupled_advantages` of the parts of the rewards."""
    return decoupled_advantages([sample.reward_parts for sample in samples], weights, _group_ids(samples), advantage)


def estimate_process(
    samples: Sequence[SampleInfo], advantage: AdvantageConfig, weights: Mapping[str, float]
) -> Sequence[PerToken]:
    """Compute `process_advantages` of the rewards of steps."""
    steps, lengths = [sample.step_rewards for sample in samples], [sample.response_tokens for sample in samples]
    return process_advantages(steps, lengths, _group_ids(samples), advantage)


def _group_ids(samples: Sequence[SampleInfo]) -> list[int]:
    return [sample.group_id for sample in samples]


@dataclass(frozen=True)
class Groups:
    """The group of each of N values, numbered from 0 to count - 1."""

    index: Tensor  # int64 [N]
    count: int

    @staticmethod
    def by_id(group_ids: Sequence[int]) -> "Groups":
        """Make groups of the ids [N] of the values, in ascending order of id."""
        ids, index = torch.tensor(group_ids, dtype=torch.int64).unique(return_inverse=True)
        return Groups(index, len(ids))

    def sizes(self) -> Tensor:
        """Return the number of values of each group, float64 [count]."""
        return self.sums(torch.ones(len(self.index), dtype=torch.float64))

    def sums(self, values: Tensor) -> Tensor:
        """Sum float64 values [N] over each group: [count]."""
        return torch.zeros(self.count, dtype=torch.float64).index_add(0, self.index, values)

    def differ(self, values: Tensor) -> Tensor:
        """Return bool [count]: whether the values of a group differ."""
        low = torch.full((self.count,), torch.inf, dtype=values.dtype).scatter_reduce(0, self.index, values, "amin")
        high = torch.full((self.count,), -torch.inf, dtype=values.dtype).scatter_reduce(0, self.index, values, "amax")
        return high > low


def outcome_advantages(
    rewards: Sequence[float], group_ids: Sequence[int], advantage: AdvantageConfig
) -> tuple[float, ...]:
    """Compute one advantage per sample from one reward per sample.

    A_i = r_i - baseline (BASELINES), divided by eps + standard deviation (SCALES) unless advantage.scale is none.
    With a group baseline, a group without difference gives exactly zero.
    """
    _check_lengths(rewards, group_ids)
    values, groups = torch.tensor(rewards, dtype=torch.float64), Groups.by_id(group_ids)
    centred = values - BASELINES[advantage.baseline](values, groups)
    if advantage.scale != "none":
        centred = centred / (SCALES[advantage.scale](values, groups, advantage.std) + advantage.eps)
    if advantage.baseline != "none":
        centred[~groups.differ(values)[groups.index]] = 0.0
    return tuple(centred.tolist())


def decoupled_advantages(
    reward_parts: Sequence[Mapping[str, float]],
    weights: Mapping[str, float],
    group_ids: Sequence[int],
    advantage: AdvantageConfig,
) -> tuple[float, ...]:
    """Normalise every reward in its group, add them up by weight, and normalise the sum over the batch.

    GDPO, arXiv 2601.05242, eq. 4 to 6. `reward_parts`: rewards of each sample by name; one that does not apply to a
    sample is missing there and adds nothing.
    """
    _check_lengths(reward_parts, group_ids)
    total = torch.zeros(len(reward_parts), dtype=torch.float64)
    single_reward = AdvantageConfig(eps=advantage.eps, std=advantage.std)
    for name, weight in weights.items():
        samples = [i for i, rewards in enumerate(reward_parts) if name in rewards]
        if samples:
            normalised = outcome_advantages(
                [reward_parts[i][name] for i in samples], [group_ids[i] for i in samples], single_reward
            )
            total[samples] += weight * torch.tensor(normalised, dtype=torch.float64)
    if not bool((total != 0).any()):
        return (0.0,) * len(reward_parts)
    return tuple(((total - total.mean()) / (_std(total, advantage.std) + advantage.eps)).tolist())


def process_advantages(
    steps: Sequence[Steps], response_tokens: Sequence[int], group_ids: Sequence[int], advantage: AdvantageConfig
) -> list[Tensor]:
    """Return [response tokens] of each sample: the sum of the normalised rewards of steps ending at or after a token.

    Rewards are normalised over all steps of the group (DeepSeekMath, section 4.1.3); a group whose steps all have
    one reward gives zeros.
    """
    _check_lengths(steps, group_ids)
    flat = [(sample, end, reward) for sample, sample_steps in enumerate(steps) for end, reward in sample_steps]
    normalised = outcome_advantages(
        [reward for _, _, reward in flat], [group_ids[sample] for sample, _, _ in flat], advantage
    )
    step_advantages = [torch.zeros(tokens, dtype=torch.float64) for tokens in response_tokens]
    for (sample, end, _), value in zip(flat, normalised, strict=True):
        step_advantages[sample][end] += value
    return [values.flip(0).cumsum(0).flip(0) for values in step_advantages]


def groups_without_difference(rewards: Sequence[float], group_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the ids of the groups whose samples all have the same reward."""
    groups = Groups.by_id(group_ids)
    same = ~groups.differ(torch.tensor(rewards, dtype=torch.float64))
    ids = sorted(set(group_ids))
    return tuple(ids[i] for i in same.nonzero()[:, 0].tolist())


def _group_mean(values: Tensor, groups: Groups) -> Tensor:
    """Return the mean of each value's group (DeepSeekMath, section 4.1.2)."""
    return groups.sums(values)[groups.index] / groups.sizes()[groups.index]


def _leave_one_out(values: Tensor, groups: Groups) -> Tensor:
    """Return the mean of the group's other values; 0 in a group of one (RLOO, arXiv 2402.14740, eq. 8)."""
    return (groups.sums(values)[groups.index] - values) / (groups.sizes()[groups.index] - 1).clamp(min=1)


BASELINES: dict[str, Callable[[Tensor, Groups], Tensor]] = {
    "group_mean": _group_mean,
    "leave_one_out": _leave_one_out,
    "none": lambda values, groups: torch.zeros_like(values),
}


def _group_std(values: Tensor, groups: Groups, kind: str) -> Tensor:
    """Return the standard deviation of each value's group: over n - 1 for kind `sample`, else over n."""
    sizes = groups.sizes()
    centred = values - (groups.sums(values) / sizes)[groups.index]
    variance = groups.sums(centred**2) / (sizes - int(kind == "sample")).clamp(min=1)
    return variance.sqrt()[groups.index]


def _std(values: Tensor, kind: str) -> Tensor:
    return values.std(correction=int(kind == "sample")) if len(values) > 1 else torch.zeros((), dtype=values.dtype)


SCALES: dict[str, Callable[[Tensor, Groups, str], Tensor]] = {
    "group_std": _group_std,
    "batch_std": lambda values, groups, kind: _std(values, kind),
}


def _check_lengths(values: Sequence[object], group_ids: Sequence[int]) -> None:
    if len(values) != len(group_ids):
        raise ValueError(f"{len(values)} samples but {len(group_ids)} group ids")
