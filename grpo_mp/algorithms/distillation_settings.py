"""Settings of on-policy distillation."""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import Field, field_serializer, field_validator, model_validator

from grpo_mp.utils.section import Section, ServedModelConfig
from grpo_mp.utils.user_code import is_path

EVERY_SET = ""  # key of a teacher of all data sets
SELF = "self"  # path of a teacher that is the policy itself; self:WHAT names what this teacher sees
RIGHT_ANSWERS = ""  # what a teacher of path SELF sees
T = TypeVar("T")


class DistillationConfig(Section):
    """On-policy distillation: a teacher scores the policy's own tokens; minus the reverse KL is their advantage.

    With topk their loss is the divergence from the teacher's most likely tokens instead.
    """

    teacher: dict[str, ServedModelConfig] = Field(
        description="the model that is learned from (TRL teacher_model_name_or_path, slime opd_teacher_load): "
        "{path, ...}; or one for each set of data.train: {SET: {path, ...}} (verl teacher_models); path self: the "
        "policy itself, shown a right answer of the group (SDPO); self:COLUMN: shown a demonstration of the data "
        "(SDFT); or asked what your own self:file.py:function writes",
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
        """Return teachers by data set; a single teacher gets the key EVERY_SET, and may be its path alone."""
        if isinstance(value, str):
            return {EVERY_SET: {"path": value}}
        has_sets = isinstance(value, dict) and value and all(isinstance(one, dict) for one in value.values())
        if has_sets and not value.keys() & {EVERY_SET, *ServedModelConfig.model_fields}:
            return value
        return {EVERY_SET: value}

    @field_serializer("teacher")
    def _shorten_teacher(self, value: dict[str, ServedModelConfig]) -> Any:
        by_set = {name: teacher.model_dump(mode="json") for name, teacher in value.items()}
        return by_set.get(EVERY_SET, by_set)

    @model_validator(mode="after")
    def _parts_agree(self) -> "DistillationConfig":
        if self.topk is None and self.kl_type != "reverse":
            raise ValueError(f"kl_type={self.kl_type} needs more of the teacher than one logprob: set topk, e.g. 64")
        own = [one for one in self.teacher.values() if _is_self(one)]
        if own and self.topk is not None:
            raise ValueError(f"topk={self.topk}: the policy as its own teacher has sampled tokens alone: set topk=null")
        if any(one.args or one.api_key_env for one in own):
            raise ValueError(f"teacher.path={own[0].path} has no server: leave out args and api_key_env")
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
        """Return the different teachers by name, see `names_by_set`; without the policy itself."""
        by_name = {name: self.teacher[data_set] for data_set, name in self.names_by_set.items()}
        return {name: teacher for name, teacher in by_name.items() if not _is_self(teacher)}

    @property
    def shown(self) -> dict[str, str | None]:
        """Return what the policy sees as the teacher of each data set; None: another model is the teacher.

        It is a column, 'module:function', or RIGHT_ANSWERS.
        """
        return {
            name: one.path.removeprefix(SELF).removeprefix(":") if _is_self(one) else None
            for name, one in self.teacher.items()
        }

    @property
    def demonstrations(self) -> dict[str, str | None]:
        """Return the column that the policy sees as the teacher of each data set; None: no column."""
        return {name: None if not what or is_path(what) else what for name, what in self.shown.items()}

    @property
    def teaches_itself(self) -> bool:
        return any(map(_is_self, self.teacher.values()))

    @property
    def replaces_rewards(self) -> bool:
        return self.advantage == "replace"


def _is_self(teacher: ServedModelConfig) -> bool:
    return teacher.path.partition(":")[0] == SELF


def of_set(values: Mapping[str, T], data_set: str | None) -> T:
    """Return the value of a data set, or the first if `values` does not name the set: then one value is of all sets."""
    return values[data_set] if data_set and data_set in values else next(iter(values.values()))
