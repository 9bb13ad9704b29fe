"""Settings of on-policy distillation."""

from typing import Literal

from pydantic import Field, model_validator

from grpo_mp.utils.section import Section, ServedModelConfig


class DistillationConfig(Section):
    """On-policy distillation: a teacher scores the policy's own tokens; minus the reverse KL is their advantage.

    With topk their loss is the divergence from the teacher's most likely tokens instead.
    """

    teacher: ServedModelConfig = Field(
        description="the model that is learned from (TRL teacher_model_name_or_path, slime opd_teacher_load)"
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

    @model_validator(mode="after")
    def _check_topk(self) -> "DistillationConfig":
        if self.topk is None and self.kl_type != "reverse":
            raise ValueError(f"kl_type={self.kl_type} needs more of the teacher than one logprob: set topk, e.g. 64")
        return self

    @property
    def replaces_rewards(self) -> bool:
        return self.advantage == "replace"
