"""The `critic` section: PPO's value model."""

from pathlib import Path
from typing import Any

from pydantic import Field

from grpo_mp.utils.section import Section


class CriticConfig(Section):
    """The value model of algorithm ppo, trained beside the policy on its ranks and in its layout.

    It may be of another family and size than the policy. Updates of a step, and all of `optimizer` but the learning
    rate, are the policy's.
    """

    path: Path | None = Field(
        None,
        description="a Hugging Face or converted folder of any family and size, with the policy's vocabulary; a reward "
        "model for sequence classification too, whose score.weight becomes the value head (verl critic.model.path, "
        "TRL reward_model_path); null: model.path, with a head of zeros",
    )
    megatron_args: dict[str, Any] = Field(
        {},
        description="Megatron's fields that replace those of training.megatron_args for the critic; null removes one",
    )
    lr: float = Field(
        1e-5, gt=0, description="highest learning rate, on the schedule of optimizer (verl critic.optim.lr)"
    )
    cliprange_value: float = Field(
        0.2, gt=0, description="how far an update moves a value from the old one before it stops to learn (TRL, verl)"
    )
    warmup_steps: int = Field(
        0, ge=0, description="first steps, in which the critic learns and the policy does not (verl critic_warmup)"
    )
