"""The settings of low-rank adapters."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from grpo_mp.utils.section import Section

ALL_LINEAR: Literal["all-linear"] = "all-linear"  # as peft writes it


def _check_module(name: str) -> str:
    """Raise ValueError for a module of one layer or expert."""
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name):
        raise ValueError(f"{name!r}: write the end of a module's name, without numbers, such as q_proj or mlp.up_proj")
    return name


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): the policy computes (W + alpha / rank * B A) x; W is frozen."""

    rank: int = Field(ge=1, le=2**16, description="rows of A, columns of B (peft r)")
    alpha: float = Field(gt=0, description="what they add is multiplied by alpha / rank (peft lora_alpha)")
    target_modules: Literal["all-linear"] | tuple[Annotated[str, AfterValidator(_check_module)], ...] = Field(
        ALL_LINEAR,
        description="modules with adapters, by the ends of their names in the Hugging Face model, as peft takes "
        "them: q_proj, mlp.up_proj, in all layers and experts; all-linear: all projections of attention, dense layers "
        "and experts. Embeddings, norms, routers and the output layer have none",
    )

    base_dtype: Literal["fp8"] | None = Field(
        None,
        description="precision in which the frozen projections of attention, dense layers and experts are kept. fp8: "
        "float8_e4m3fn with a float32 factor for each 128 x 128 block (DeepSeek-V3, arXiv 2412.19437, 3.3), converted "
        "to model.dtype where a layer computes; bits of an FP8 checkpoint stay as they are where its blocks lie in a "
        "rank's shard as in the file. null: model.dtype",
    )

    @field_validator("target_modules")
    @classmethod
    def _check_any(cls, modules: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not modules:
            raise ValueError("no module would have an adapter, and nothing would learn: name some, or leave it out")
        return modules

    @property
    def targets(self) -> tuple[str, ...] | None:
        """Return the names of the modules with adapters; None: all projections."""
        return None if self.target_modules == ALL_LINEAR else tuple(self.target_modules)

    @property
    def description(self) -> str:
        """Return what adapters learned for: another factor or other modules would make another model of them."""
        modules = self.target_modules if self.targets is None else " ".join(sorted(self.targets))
        base = f" beside weights in {self.base_dtype}" if self.base_dtype else ""
        return f"of rank {self.rank} and alpha {self.alpha:g} on {modules}{base}"

    @property
    def scale(self) -> float:
        """Return the factor of what an adapter adds."""
        return self.alpha / self.rank
