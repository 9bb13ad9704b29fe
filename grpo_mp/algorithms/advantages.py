"""Advantages from rewards, in float64. Samples are grouped by group id; groups differ in size and are in any order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from grpo_mp.algorithms.distillation_settings import DistillationConfig
from grpo_mp.algorithms.registries import ADVANTAGE_ESTIMATORS
from grpo_mp.algorithms.settings import AdvantageConfig
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import PerToken, SampleInfo

EPS = 1e-4  # added to the standard deviation that rewards are divided by, as in TRL


class AdvantageEstimator(Protocol):
    """Computes the advantage of each sample of a step: a number, or [response tokens of all its sequences].

    `samples`: all samples of the step that have a reward, the same on every rank, with groups by `group_id`;
    `advantage`: that section of the settings; `weights`: weights of the reward terms, by name.
    """

    def __call__(
        self, samples: Sequence[SampleInfo], advantage: AdvantageConfig, weights: Mapping[str, float], /
    ) -> Sequence[PerToken]:
        """Return one advantage per sample."""


def load_estimator(advantage: AdvantageConfig) -> AdvantageEstimator:
    """Return the advantage estimator that the settings name."""
    name = advantage.estimator or advantage.built_in
    return ADVANTAGE_ESTIMATORS.resolve(name, "algorithm.advantage.estimator")


def estimate_advantages(
    estimator: AdvantageEstimator,
    samples: Sequence[SampleInfo],
    advantage: AdvantageConfig,
    weights: Mapping[str, float],
) -> list[PerToken]:
    """Call an estimator with the samples that have a reward; the advantage of the other samples is 0.

    With level process all samples are passed: a reward may be missing for single steps, see `estimate_process`.
    """
    label = f"algorithm.advantage.estimator {advantage.estimator or advantage.built_in!r}"
    scored = [sample for sample in samples if sample.is_scored or advantage.level == "process"]
    advantages = list(estimator(scored, advantage, weights))
    if len(advantages) != len(scored):
        raise UserError(f"{label} returned {len(advantages)} advantages for {len(scored)} samples")
    for sample, values in zip(scored, advantages, strict=True):
        tensor = torch.as_tensor(values)
        if tensor.shape not in ((), (sample.all_response_tokens,)) or not bool(tensor.isfinite().all()):
            of_all = f" of its {len(sample.sequences)} sequences" if sample.earlier else ""
            raise UserError(
                f"{label}: the advantage of sample {sample.key} has shape {list(tensor.shape)} or is not finite: "
                f"return a number or [{sample.all_response_tokens}], one for each response token{of_all}"
            )
    of_scored = dict(zip((sample.key for sample in scored), advantages, strict=True))
    return [of_scored.get(sample.key, 0.0) for sample in samples]


@dataclass(frozen=True)
class Groups:
    """Groups of N values, numbered from 0 to count - 1."""

    index: Tensor  # int64 [N]
    count: int

    @staticmethod
    def by_id(group_ids: Sequence[int]) -> "Groups":
        """Return the groups of values with the group ids [N], numbered in ascending order of id."""
        ids, index = torch.tensor(group_ids, dtype=torch.int64).unique(return_inverse=True)
        return Groups(index, len(ids))

    def sizes(self) -> Tensor:
        """Return the number of values in each group, float64 [count]."""
        return self.sums(torch.ones(len(self.index), dtype=torch.float64))

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of float64 values [N] in each group, [count]."""
        return torch.zeros(self.count, dtype=torch.float64).index_add(0, self.index, values)

    def has_nonzero_std(self, values: Tensor) -> Tensor:
        low = torch.full((self.count,), torch.inf, dtype=values.dtype).scatter_reduce(0, self.index, values, "amin")
        high = torch.full((self.count,), -torch.inf, dtype=values.dtype).scatter_reduce(0, self.index, values, "amax")
        return high > low


def outcome_advantages(
    rewards: Sequence[float], group_ids: Sequence[int], advantage: AdvantageConfig
) -> tuple[float, ...]:
    """Compute one advantage per sample from one reward per sample.

    A_i = (r_i - baseline_i) / (scale_i + EPS), with the baseline from BASELINES and the scale from SCALES; scale none
    does not divide. With a group baseline, a group with equal rewards gets exactly 0.
    """
    values = torch.tensor(rewards, dtype=torch.float64)
    groups = Groups.by_id(group_ids)
    if advantage.scale == "group_mean" and min(rewards, default=0.0) < 0:
        raise UserError(
            f"algorithm.advantage.scale=group_mean divides by the mean reward of a group, and a reward is "
            f"{min(rewards):g}: give rewards of 0 or more, or set another scale"
        )
    centered = values - BASELINES[advantage.baseline](values, groups)
    if advantage.scale != "none":
        centered = centered / (SCALES[advantage.scale](values, groups) + EPS)
    if advantage.compares_groups:
        centered[~groups.has_nonzero_std(values)[groups.index]] = 0.0
    return tuple(centered.tolist())


def estimate_outcome(
    samples: Sequence[SampleInfo], advantage: AdvantageConfig, weights: Mapping[str, float]
) -> Sequence[PerToken]:
    """Compute `outcome_advantages` from the rewards of the samples."""
    return outcome_advantages([sample.reward for sample in samples], [sample.group_id for sample in samples], advantage)


def estimate_decoupled(
    samples: Sequence[SampleInfo], advantage: AdvantageConfig, weights: Mapping[str, float]
) -> Sequence[PerToken]:
    """Normalize every reward term within its group, add the terms by weight, and normalize the sums over the batch.

    GDPO, arXiv 2601.05242, eq. 4 to 6. A term that does not apply to a sample adds nothing to its sum.
    """
    total = torch.zeros(len(samples), dtype=torch.float64)
    for name, weight in weights.items():
        applicable = [i for i, sample in enumerate(samples) if name in sample.reward_terms]
        if applicable:
            rewards, ids = zip(*((samples[i].reward_terms[name], samples[i].group_id) for i in applicable), strict=True)
            normalized = outcome_advantages(rewards, ids, AdvantageConfig())
            total[applicable] += weight * torch.tensor(normalized, dtype=torch.float64)
    if not bool((total != 0).any()):
        return (0.0,) * len(samples)
    return tuple(((total - total.mean()) / (_std(total) + EPS)).tolist())


def estimate_pass_at_k(
    samples: Sequence[SampleInfo], advantage: AdvantageConfig, weights: Mapping[str, float]
) -> Sequence[PerToken]:
    """Give the best sample of each group its lead over the second best, and all others 0 (arXiv 2503.19595).

    This is the leave-one-out gradient of the group's maximum. `advantage.scale` divides as in `outcome_advantages`.
    """
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    groups = Groups.by_id([sample.group_id for sample in samples])
    leads = torch.zeros_like(rewards)
    for number in range(groups.count):
        members = (groups.index == number).nonzero().flatten()
        if len(members) > 1:
            best, second = rewards[members].topk(2)[0]
            leads[members[rewards[members].argmax()]] = best - second
    if advantage.scale != "none":
        leads = leads / (SCALES[advantage.scale](rewards, groups) + EPS)
    return tuple(leads.tolist())


def estimate_process(
    samples: Sequence[SampleInfo], advantage: AdvantageConfig, weights: Mapping[str, float]
) -> list[Tensor]:
    """Return for each token the sum of the normalized rewards of steps that end at it or later, [response tokens].

    Rewards are normalized over all steps of the group (DeepSeekMath, section 4.1.3); a group whose step rewards are all
    equal gets zeros. The sequences of an episode follow each other in the order of their last turns.
    """
    flat = [(i, end, reward) for i, sample in enumerate(samples) for end, reward in sample.all_step_rewards]
    ids = [samples[i].group_id for i, _, _ in flat]
    normalized = outcome_advantages([reward for _, _, reward in flat], ids, advantage)
    step_advantages = [torch.zeros(sample.all_response_tokens, dtype=torch.float64) for sample in samples]
    for (i, end, _), value in zip(flat, normalized, strict=True):
        step_advantages[i][end] += value
    return [values.flip(0).cumsum(0).flip(0) for values in step_advantages]


def estimate_roles(
    samples: Sequence[SampleInfo], advantage: AdvantageConfig, weights: Mapping[str, float]
) -> list[Tensor]:
    """Normalize the rewards of each role over the group's episodes; return them for all tokens of the role's sequences.

    Role-conditioned advantages, as in SPIRAL (arXiv 2506.24119, section 3.3). There the baseline is a moving average by
    game and role; here the settings under `advantage` apply, by prompt and role. The reward of a role is the sum of a
    sequence's step rewards, see `Episode.with_role_rewards`.
    """
    played = [
        (number, sequence.role, sum(reward for _, reward in sequence.step_rewards))
        for number, sample in enumerate(samples)
        for sequence in sample.sequences
    ]
    roles = sorted({(samples[number].group_id, role) for number, role, _ in played})
    ids = [roles.index((samples[number].group_id, role)) for number, role, _ in played]
    values = iter(outcome_advantages([reward for _, _, reward in played], ids, advantage))
    return [
        torch.cat([torch.full((one.response_tokens,), next(values), dtype=torch.float64) for one in sample.sequences])
        for sample in samples
    ]


def distillation_advantages(policy: Tensor, teacher: Tensor, distillation: DistillationConfig) -> Tensor:
    """Return coef * (log p_teacher - log p_policy) of each sampled token, float64 [T].

    This is minus the estimate of the reverse KL at the sampled token (Thinking Machines Lab, On-policy distillation,
    2025; the single-step part of MiniLLM's gradient, arXiv 2306.08543, eq. 6). Later tokens do not contribute.
    """
    return distillation.coef * (teacher.double() - policy.double())


def _group_mean(values: Tensor, groups: Groups) -> Tensor:
    """Return for each value the mean of its group (DeepSeekMath, section 4.1.2)."""
    return groups.sums(values)[groups.index] / groups.sizes()[groups.index]


def _leave_one_out(values: Tensor, groups: Groups) -> Tensor:
    """Return for each value the mean of its group's others; 0 in a group of one (RLOO, arXiv 2402.14740, eq. 8)."""
    return (groups.sums(values)[groups.index] - values) / (groups.sizes()[groups.index] - 1).clamp(min=1)


BASELINES: dict[str, Callable[[Tensor, Groups], Tensor]] = {
    "group_mean": _group_mean,
    "leave_one_out": _leave_one_out,
    "none": lambda values, groups: torch.zeros_like(values),
    # These are subtracted later, token by token.
    "optimal_token": lambda values, groups: torch.zeros_like(values),
    "critic": lambda values, groups: torch.zeros_like(values),
}


def _group_std(values: Tensor, groups: Groups) -> Tensor:
    sizes = groups.sizes()
    centered = values - (groups.sums(values) / sizes)[groups.index]
    variance = groups.sums(centered**2) / (sizes - 1).clamp(min=1)
    return variance.sqrt()[groups.index]


def _std(values: Tensor) -> Tensor:
    return values.std() if len(values) > 1 else torch.zeros((), dtype=values.dtype)


SCALES: dict[str, Callable[[Tensor, Groups], Tensor]] = {
    "group_std": _group_std,
    "batch_std": lambda values, groups: _std(values),
    "group_mean": _group_mean,  # of the maximum-likelihood objective (MaxRL, arXiv 2602.02710)
}
