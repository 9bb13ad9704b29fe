"""The settings of low-rank adapters."""

from typing import Annotated, Literal

from pydantic import Field

from grpo_mp.section import Section

ALL_LINEAR = "all-linear"  # as peft writes it


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): the policy computes (W + alpha / rank * B A) x; W is frozen."""

    rank: int = Field(ge=1, le=2**16, description="rows of A, columns of B (peft r)")
    alpha: float = Field(gt=0, description="what they add is multiplied by alpha / rank (peft lora_alpha)")
    target_modules: Literal["all-linear"] | tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        ALL_LINEAR,
        description="modules with adapters, by their names in the Hugging Face model or the ends of these, as peft "
        "takes them: q_proj, experts.0.up_proj; all-linear: all projections of attention, dense layers and experts. "
        "Embeddings, norms, routers and the output layer have none",
    )

    @property
    def targets(self) -> tuple[str, ...] | None:
        """Return the names of the modules with adapters; None: all projections."""
        return None if self.target_modules == ALL_LINEAR else tuple(self.target_modules)

    @property
    def scale(self) -> float:
        """Return the factor of what an adapter adds."""
        return self.alpha / self.rank
