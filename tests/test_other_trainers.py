"""Names of other trainers' settings are answered with the name here, and every name here exists."""

import pytest

from grpo_mp.config import check_settings
from grpo_mp.config.other_trainers import translate
from grpo_mp.utils.errors import UserError
from tests.minimal_settings import MINIMAL_SETTINGS


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("rollout.n", "verl's rollout.n is rollout.group_size here"),
        ("rollout.num_generations", "TRL's num_generations is rollout.group_size here"),
        ("actor.clip_ratio_low", "verl's actor.clip_ratio_low is algorithm.clip.low here"),
        ("training.rollout_batch_size", "slime's --rollout-batch-size is rollout.prompts_per_step here"),
        ("steps_per_generation", "TRL's steps_per_generation is training.updates_per_step here"),
        ("reward.path", ""),
        ("algorithm.rollout_correction", ""),  # verl's name, too
        ("rollout.group_sise", ""),
    ],
)
def test_a_setting_of_another_trainer(written: str, sentence: str) -> None:
    assert translate(written) == sentence


def test_an_unknown_section_names_each_setting_below_it() -> None:
    with pytest.raises(UserError) as error:
        check_settings({**MINIMAL_SETTINGS, "trainer": {"total_training_steps": 10, "logger": ["console"]}}, "my.yaml")
    assert str(error.value) == (
        "my.yaml: unknown setting trainer: verl's trainer.total_training_steps is run.steps here; "
        "verl's trainer.logger is monitor.loggers here"
    )
