"""Which groups are informative: what `algorithm.filter.metric` names. Pure."""

from collections.abc import Sequence
from typing import Protocol

from grpo_mp.algorithms.registries import GROUP_FILTERS
from grpo_mp.algorithms.settings import FilterConfig
from grpo_mp.utils.types import SampleInfo


class GroupFilter(Protocol):
    """Says whether a group is kept. `samples`: those of one group that have a reward, at least one.

    `algorithm.filter.args` come by name.

    Called on every rank with the same samples, and must say the same there.
    """

    def __call__(self, samples: Sequence[SampleInfo], /) -> bool:
        """Return whether the group is kept."""


def load_group_filter(rule: FilterConfig) -> GroupFilter:
    """Return the filter that the settings name. Raises UserError where a user's own cannot be loaded."""
    return GROUP_FILTERS.resolve(rule.metric, "algorithm.filter.metric", rule.args)


def rewards_differ(samples: Sequence[SampleInfo]) -> bool:
    """Keep a group whose rewards are not all equal."""
    return len({sample.reward for sample in samples}) > 1


def accuracies_differ(samples: Sequence[SampleInfo]) -> bool:
    """Return whether a group has right and wrong samples (DAPO, eq. 11); without correctness, compare its rewards.

    Samples of which nothing says whether they are right do not count.
    """
    verdicts = {sample.is_correct for sample in samples if sample.is_correct is not None}
    return len(verdicts) > 1 if verdicts else rewards_differ(samples)
