"""Decode steps with drafts: what drafting costs, and the tokens that a step then yields. Pure."""

from dataclasses import dataclass

from grpo_mp.planner.clusters import OVERHEADS
from grpo_mp.planner.job import PlannedJob
from grpo_mp.utils.errors import UserError


@dataclass(frozen=True)
class Speculation:
    """A decode step with its drafts: of a sequence it computes `verified_tokens` and yields `acceptance_length`.

    `drafting`: cost of the step with its drafts over that without.
    """

    acceptance_length: float = 1.0
    verified_tokens: int = 1
    drafting: float = 1.0

    def __post_init__(self) -> None:
        """Raise UserError where a step yields more than it computes."""
        if not 1 <= self.acceptance_length <= self.verified_tokens:
            raise UserError(
                f"--acceptance-length {self.acceptance_length:g}: a step computes {self.verified_tokens} tokens of a "
                "sequence: give 1 to that many, with engine.speculative"
            )


def speculation(job: PlannedJob, draft_tokens: int | None = None) -> Speculation:
    """Return what `engine.speculative` makes of a decode step, or so many tokens that one layer drafts instead.

    A token that a layer drafts costs a layer's share of a step, one of an n-gram nothing. Where the acceptance length
    is not given, each token after accepted ones is accepted with the same probability p: 1 + p + p^2 + ...
    """
    config = job.settings.engine.speculative
    verified = config.verified_tokens if draft_tokens is None else 1 + draft_tokens
    steps = draft_tokens or 0
    if draft_tokens is None and config.drafts_by_mtp:
        steps = config.num_steps
    share = OVERHEADS.draft_acceptance if config.drafts_by_mtp and draft_tokens is None else 0.0
    accepted = job.acceptance_length or sum(share**place for place in range(min(steps + 1, verified)))
    return Speculation(accepted, verified, 1 + steps / job.model.num_layers)
