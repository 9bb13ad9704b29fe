"""Registries of losses, advantage estimators, group filters, curricula and teacher's prompts. Imports no torch."""

from dataclasses import dataclass
from typing import Any, Literal

from grpo_mp.utils.registry import LazyEntry, Registry

LOSS_MODULE, FILTER_MODULE = (f"grpo_mp.algorithms.{module}:" for module in ("policy_losses", "selection"))


@dataclass(frozen=True)
class PolicyLossEntry(LazyEntry):
    """A policy loss, and its properties that the checks of settings read."""

    reads: tuple[str, ...] = ()  # sections of `algorithm`, which matter only for ratios other than 1
    token_ratios: bool = False  # defined on ratios of tokens, so `ratio` must be token
    # Levels of the rollout correction that the loss applies itself; for (), the caller multiplies each token by it.
    applies_correction: tuple[Literal["token", "sequence"], ...] = ()
    has_dual_clip: bool = False  # limits ratios by `clip.dual_clip`
    token_advantages: bool = True  # each token has its own advantage; False: a sequence has their mean
    divergence: Literal["tv", "kl"] | None = None  # what `clip` limits; None: ratios
    covariance: Literal["random", "largest"] | None = None  # which tokens of high covariance it treats apart
    needs_correctness: bool = False  # reads which answers are right, so a reward term must decide it


@dataclass(frozen=True)
class GroupFilterEntry(LazyEntry):
    """A group filter, and its properties that the checks of settings read."""

    needs_correctness: bool = False  # reads `is_correct`, so a reward term must decide it


POLICY_LOSSES: Registry[Any] = Registry(
    "policy loss",
    {
        "clip": PolicyLossEntry(LOSS_MODULE + "ppo_clip", reads=("clip",), has_dual_clip=True),
        "cispo": PolicyLossEntry(LOSS_MODULE + "cispo", reads=("clip",)),
        "sapo": PolicyLossEntry(LOSS_MODULE + "sapo", reads=("sapo",)),
        "gmpo": PolicyLossEntry(
            LOSS_MODULE + "gmpo",
            reads=("clip",),
            token_ratios=True,
            applies_correction=("token", "sequence"),
            token_advantages=False,
        ),
        "vespo": PolicyLossEntry(
            LOSS_MODULE + "vespo", reads=("vespo",), token_ratios=True, applies_correction=("token",)
        ),
        "dppo_tv": PolicyLossEntry(LOSS_MODULE + "dppo_tv", reads=("clip",), token_ratios=True, divergence="tv"),
        "dppo_kl": PolicyLossEntry(LOSS_MODULE + "dppo_kl", reads=("clip",), token_ratios=True, divergence="kl"),
        "clip_cov": PolicyLossEntry(LOSS_MODULE + "clip_cov", reads=("clip",), has_dual_clip=True, covariance="random"),
        "kl_cov": PolicyLossEntry(LOSS_MODULE + "kl_cov", covariance="largest"),
        "clip_positive": PolicyLossEntry(
            LOSS_MODULE + "clip_positive", reads=("clip",), has_dual_clip=True, needs_correctness=True
        ),
        "unclipped": PolicyLossEntry(LOSS_MODULE + "policy_gradient"),
    },
    parameters=("terms", "algorithm"),
)
ADVANTAGE_ESTIMATORS: Registry[Any] = Registry(
    "advantage estimator",
    {
        "pass_at_k": LazyEntry("grpo_mp.algorithms.advantages:estimate_pass_at_k"),
        "roles": LazyEntry("grpo_mp.algorithms.advantages:estimate_roles"),
    },
    parameters=("samples", "advantage", "weights"),
)
GROUP_FILTERS: Registry[Any] = Registry(
    "group filter",
    {
        "reward": GroupFilterEntry(FILTER_MODULE + "rewards_differ"),
        "accuracy": GroupFilterEntry(FILTER_MODULE + "accuracies_differ", needs_correctness=True),
    },
    parameters=("samples",),
)

CURRICULA: Registry[Any] = Registry("curriculum", parameters=("samples", "step"))
TEACHER_PROMPTS: Registry[Any] = Registry("teacher's prompt", parameters=("prompt", "samples"))


def policy_loss_entry(name: str) -> PolicyLossEntry:
    """Return the registry's entry of a policy loss; an entry with default properties for a user's own."""
    entry = POLICY_LOSSES.built_in.get(name)
    return entry if isinstance(entry, PolicyLossEntry) else PolicyLossEntry(name)


def needs_correctness(filter_name: str) -> bool:
    """Return whether a group filter reads `is_correct`; False for a user's own, which must check that itself."""
    entry = GROUP_FILTERS.built_in.get(filter_name)
    return isinstance(entry, GroupFilterEntry) and entry.needs_correctness
