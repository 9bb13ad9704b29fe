"""The settings of speculative decoding."""

from typing import Literal

from pydantic import Field

from grpo_mp.utils.section import Section


class SpeculativeConfig(Section):
    """Speculative decoding: an engine drafts tokens, and one step of the model verifies them. On GPUs only."""

    algorithm: Literal["none", "mtp", "ngram"] = Field(
        "none",
        description="mtp: the model's own multi-token-prediction layer drafts, as the folder has it, or as "
        "model.mtp_loss_scaling_factor trains it (SGLang NEXTN); ngram: what followed the same tokens before in "
        "prompts and responses (SGLang NGRAM)",
    )
    num_steps: int = Field(3, ge=1, description="tokens that are drafted one after the other (SGLang's argument)")

    @property
    def drafts_by_mtp(self) -> bool:
        """Return whether engines hold the model's multi-token-prediction layer, and draft with it."""
        return self.algorithm == "mtp"

    @property
    def verified_tokens(self) -> int:
        """Return the tokens of a sequence that a step of the model computes."""
        return self.num_steps + 1 if self.algorithm != "none" else 1
