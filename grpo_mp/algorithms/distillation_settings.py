"""Settings of on-policy distillation."""

from typing import Any, Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from grpo_mp.utils.section import Section, ServedModelConfig

EVERY_SET = ""  # key of a teacher of all data sets


class DistillationConfig(Section):
    """On-policy distillation: a teacher scores the policy's own tokens; minus the reverse KL is their advantage.

    With topk their loss is the divergence from the teacher's most likely tokens instead.
    """

    teacher: dict[str, ServedModelConfig] = Field(
        description="the model that is learned from (TRL teacher_model_name_or_path, slime opd_teacher_load): "
        "{path, ...}; or one for each set of data.train: {SET: {path, ...}} (verl teacher_models)",
    )
    coef: float = Field(1.0, gt=0, description="weight of the teacher's part (slime opd_kl_coef)")
    advantage: Literal["replace", "add"] = Field(
        "replace", description="replace: learn from the teacher alone; add: from rewards, too"
    )
    topk: int | None = Field(
        None,
        ge=1,
        description="compare with the teacher's most likely tokens, as a loss (NeMo-RL topk_logits_k, verl "
        "topk); null: with the sampled token alone",
    )
    kl_type: Literal["reverse", "forward", "mixed"] = Field(
        "reverse",
        description="divergence of topk: KL(policy, teacher), KL(teacher, policy), or their mean (NeMo-RL kl_type)",
    )

    @field_validator("teacher", mode="before")
    @classmethod
    def _expand_teacher(cls, value: Any) -> Any:
        """Return teachers by data set; a single teacher gets the key EVERY_SET."""
        has_sets = isinstance(value, dict) and value and all(isinstance(one, dict) for one in value.values())
        if has_sets and not value.keys() & {EVERY_SET, *ServedModelConfig.model_fields}:
            return value
        return {EVERY_SET: value}

    @field_serializer("teacher")
    def _shorten_teacher(self, value: dict[str, ServedModelConfig]) -> Any:
        by_set = {name: teacher.model_dump(mode="json") for name, teacher in value.items()}
        return by_set.get(EVERY_SET, by_set)

    @model_validator(mode="after")
    def _check_topk(self) -> "DistillationConfig":
        if self.topk is None and self.kl_type != "reverse":
            raise ValueError(f"kl_type={self.kl_type} needs more of the teacher than one logprob: set topk, e.g. 64")
        return self

    @property
    def names_by_set(self) -> dict[str, str]:
        """Return the name of each data set's teacher: teacher.SET, or teacher for EVERY_SET.

        Sets with equal teachers share the name of the first, so that one server teaches them.
        """
        firsts = {
            name: next(first for first, other in self.teacher.items() if other == teacher)
            for name, teacher in self.teacher.items()
        }
        return {name: f"teacher.{first}".removesuffix(".") for name, first in firsts.items()}

    @property
    def teachers(self) -> dict[str, ServedModelConfig]:
        """Return the different teachers by name, see `names_by_set`."""
        return {name: self.teacher[data_set] for data_set, name in self.names_by_set.items()}

    @property
    def replaces_rewards(self) -> bool:
        return self.advantage == "replace"
