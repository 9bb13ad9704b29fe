"""Which groups a step trains on (`algorithm.filter`), and which prompts later steps skip (`algorithm.curriculum`)."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from grpo_mp.algorithms.registries import CURRICULA, GROUP_FILTERS
from grpo_mp.algorithms.settings import CurriculumConfig, FilterConfig
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.types import SampleInfo


class GroupFilter(Protocol):
    """Says whether a group is kept. `samples`: those of one group that have a reward, at least one.

    Called on every rank with the same samples, and must say the same there.
    """

    def __call__(self, samples: Sequence[SampleInfo], /) -> bool:
        """Return whether the group is kept."""


def load_group_filter(rule: FilterConfig) -> GroupFilter:
    """Return the filter that the settings name."""
    return GROUP_FILTERS.resolve(rule.metric, "algorithm.filter.metric")


def rewards_differ(samples: Sequence[SampleInfo]) -> bool:
    """Accept a group whose rewards are not all equal."""
    return len({sample.reward for sample in samples}) > 1


def accuracies_differ(samples: Sequence[SampleInfo]) -> bool:
    """Return whether a group has right and wrong samples (DAPO, eq. 11); without correctness, compare its rewards.

    Samples of which nothing says whether they are right do not count.
    """
    verdicts = {sample.is_correct for sample in samples if sample.is_correct is not None}
    return len(verdicts) > 1 if verdicts else rewards_differ(samples)


class Curriculum(Protocol):
    """Says after a step which prompts are skipped.

    `samples`: all that were generated for the step, of finished groups, with reward, is_correct and `prompt`, the
    prompt's index. Called on every rank with the same samples, and must say the same there. What it returns is kept in
    checkpoints; anything else that it remembers is lost when a run resumes.
    """

    def __call__(self, samples: Sequence[SampleInfo], step: int, /) -> Mapping[int, int]:
        """Return the prompts to skip, by index, and the last step that skips each; one already over takes it back."""


def load_curriculum(rule: CurriculumConfig) -> Curriculum | None:
    """Return the user's function; None where the settings name none."""
    return CURRICULA.resolve(rule.function, "algorithm.curriculum.function") if rule.function else None


def call_curriculum(curriculum: Curriculum, samples: Sequence[SampleInfo], step: int) -> dict[int, int]:
    """Return what a user's function says."""
    try:
        skipped = dict(curriculum(samples, step))
        if not all(type(number) is int for item in skipped.items() for number in item):
            raise TypeError(f"{skipped!r:.200} maps no prompt indices to steps")
    except Exception as error:
        raise UserError(
            f"algorithm.curriculum.function: step {step}: it failed: {type(error).__name__}: {one_line(error)}"
        ) from error
    return skipped
