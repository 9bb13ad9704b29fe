"""Which groups a step trains on (`algorithm.filter`), and which prompts later steps skip (`algorithm.curriculum`)."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from grpo_mp.algorithms.registries import CURRICULA, GROUP_FILTERS
from grpo_mp.algorithms.settings import CurriculumConfig, FilterConfig
from grpo_mp.utils.errors import refuse_failures
from grpo_mp.utils.types import SampleInfo


class GroupFilter(Protocol):
    """Decides whether a step trains on a group. `samples`: the group's samples that have a reward, at least one.

    Every rank calls it with the same samples, and it must return the same result.
    """

    def __call__(self, samples: Sequence[SampleInfo], /) -> bool:
        """Return whether to keep the group."""


def load_group_filter(rule: FilterConfig) -> GroupFilter:
    """Return the group filter that the settings name."""
    return GROUP_FILTERS.resolve(rule.metric, "algorithm.filter.metric")


def rewards_differ(samples: Sequence[SampleInfo]) -> bool:
    """Return whether the rewards of a group are not all equal."""
    return len({sample.reward for sample in samples}) > 1


def accuracies_differ(samples: Sequence[SampleInfo]) -> bool:
    """Return whether a group has right and wrong samples (DAPO, eq. 11); if none is judged, whether rewards differ.

    Samples whose `is_correct` is None do not count.
    """
    verdicts = {sample.is_correct for sample in samples if sample.is_correct is not None}
    return len(verdicts) > 1 if verdicts else rewards_differ(samples)


class Curriculum(Protocol):
    """Decides after a step which prompts later steps skip.

    `samples`: all samples of the step's finished groups, with reward, is_correct and `prompt`, the prompt's index.
    Every rank calls it with the same samples, and it must return the same result. Checkpoints hold the result; any
    other state is lost when a run resumes.
    """

    def __call__(self, samples: Sequence[SampleInfo], step: int, /) -> Mapping[int, int]:
        """Return the last step that skips each prompt, by the prompt's index; a past step ends the skipping."""


def load_curriculum(rule: CurriculumConfig) -> Curriculum | None:
    """Return the user's curriculum; None if the settings name none."""
    return CURRICULA.resolve(rule.function, "algorithm.curriculum.function") if rule.function else None


def call_curriculum(curriculum: Curriculum, samples: Sequence[SampleInfo], step: int) -> dict[int, int]:
    """Call a user's curriculum; return the last step that skips each prompt, by the prompt's index."""
    with refuse_failures(f"algorithm.curriculum.function: step {step}: it failed"):
        skipped = dict(curriculum(samples, step))
        if not all(type(number) is int for item in skipped.items() for number in item):
            raise TypeError(f"{skipped!r:.200} maps no prompt indices to steps")
    return skipped
