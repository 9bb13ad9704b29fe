"""Losses, advantage estimators, group filters and curricula by name, with what settings must know of them. No torch."""

from dataclasses import dataclass
from typing import Any, Literal

from grpo_mp.utils.registry import LazyEntry, Registry

LOSS_MODULE, FILTER_MODULE = (f"grpo_mp.algorithms.{module}:" for module in ("policy_losses", "selection"))


@dataclass(frozen=True)
class PolicyLossEntry(LazyEntry):
    """A policy loss, and what the checks of settings need of it."""

    reads: tuple[str, ...] = ()  # sections of `algorithm`, which act on ratios other than 1 only
    token_ratios: bool = False  # it is defined on the ratios of tokens, so `ratio` must be token
    # Levels of the correction that it applies itself; by any other loss each token's own is multiplied.
    applies_correction: tuple[Literal["token", "sequence"], ...] = ()
    has_dual_clip: bool = False  # it limits ratios by `clip.dual_clip`
    token_advantages: bool = True  # each token is weighted by its own; false: a sequence by their mean


@dataclass(frozen=True)
class GroupFilterEntry(LazyEntry):
    """A group filter of the registry."""

    needs_correctness: bool = False  # which answers are right, by reward.correct


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
        "unclipped": PolicyLossEntry(LOSS_MODULE + "policy_gradient"),
    },
    parameters=("terms", "algorithm"),
)
ADVANTAGE_ESTIMATORS: Registry[Any] = Registry("advantage estimator", parameters=("samples", "advantage", "weights"))
GROUP_FILTERS: Registry[Any] = Registry(
    "group filter",
    {
        "reward": GroupFilterEntry(FILTER_MODULE + "rewards_differ"),
        "accuracy": GroupFilterEntry(FILTER_MODULE + "accuracies_differ", needs_correctness=True),
    },
    parameters=("samples",),
)

CURRICULA: Registry[Any] = Registry("curriculum", parameters=("samples", "step"))


def policy_loss_entry(name: str) -> PolicyLossEntry:
    """Return what is known of a policy loss; of a user's own, nothing."""
    entry = POLICY_LOSSES.built_in.get(name)
    return entry if isinstance(entry, PolicyLossEntry) else PolicyLossEntry(name)


def needs_correctness(filter_name: str) -> bool:
    """Return whether a group filter needs to know which answers are right; a user's own must see to it itself."""
    entry = GROUP_FILTERS.built_in.get(filter_name)
    return isinstance(entry, GroupFilterEntry) and entry.needs_correctness
