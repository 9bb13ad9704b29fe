"""The section of the settings about `grpo-mp sample`: which answers are kept."""

from typing import Any

from pydantic import Field, field_validator

from grpo_mp.config.registries import SAMPLE_FILTERS
from grpo_mp.utils.section import Section


class SampleConfig(Section):
    """What `grpo-mp sample` draws beyond the settings of the rollout, and which answers it keeps."""

    filters: dict[str, dict[str, Any]] = Field(
        {},
        description="which answers are kept, each filter with its arguments, in this order: right (is_correct), "
        "best {k} (by reward), tokens {min, max} (of the response), complete (not truncated, no failed episode), "
        "distinct (texts of a prompt), or your own 'file.py:function'; also one name, or a list",
    )
    max_unanswered: float = Field(
        0.01,
        ge=0,
        le=1,
        description="share of the prompts that may stay without answers, as those that take longer than "
        "rollout.group_timeout_s; where more do, the files are written, and the command fails",
    )
    max_prompts: int | None = Field(None, gt=0, description="answer only the first prompts, up to this number")
    deterministic: bool = Field(
        True,
        description="as engine.deterministic, which training has false by default: every answer has a seed of its own, "
        "so a sampling that was killed, or has more engines, gives the same answers; false: engines draw freely, which "
        "is faster on GPUs",
    )

    @field_validator("filters", mode="before")
    @classmethod
    def _filters_from_list(cls, value: Any) -> Any:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list):
            return value
        filters: dict[str, Any] = {}
        for item in items:
            named = {item: {}} if isinstance(item, str) else item
            if not isinstance(named, dict):
                return value  # which the type refuses
            if twice := filters.keys() & named.keys():
                raise ValueError(f"{min(map(str, twice))} is there twice: name it once")
            filters |= named
        return filters

    @field_validator("filters")
    @classmethod
    def _filters_exist(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return {SAMPLE_FILTERS.check_name(name): arguments for name, arguments in value.items()}
