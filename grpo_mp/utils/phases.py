"""The phases of a step: what each one is called on screen, what it keeps on the device, whether it counts as work."""

from dataclasses import dataclass, replace
from enum import StrEnum

GIB = 2**30  # bytes
WAIT = "WAIT"  # span in which a rank only waits for other ranks, inside a phase or between phases
SAVE_WAIT = "SAVE_WAIT"  # span in which the loop waits for the last checkpoint to be written
WEIGHT_CHECK = "WEIGHT_CHECK"  # span around the phases that compare engines and policy after a sync
MOVE = "MOVE"  # span in which weights and states are offloaded and onloaded at the start of a phase


@dataclass(frozen=True)
class Residency:
    """What occupies the device. Everything else of the trainer waits on the host; the engine's is given up."""

    communicators: bool = False  # first: what is onloaded next may use them
    policy_weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    engine_weights: bool = False
    engine_cache: bool = False
    reward_model: bool = False  # and teacher, of servers that the job itself started


TRAINER = Residency(communicators=True, policy_weights=True)
GENERATION = Residency(engine_weights=True, engine_cache=True)


class Phase(StrEnum):
    """A part of a step in which either the engines or the policy compute."""

    description: str
    resident: Residency
    is_work: bool  # time outside such phases is overhead

    def __new__(cls, value: str, description: str, resident: Residency, is_work: bool) -> "Phase":
        phase = str.__new__(cls, value)
        phase._value_ = value
        phase.description, phase.resident, phase.is_work = description, resident, is_work
        return phase

    GENERATE = "GENERATE", "the engines write answers", GENERATION, True
    SCORE = "SCORE", "the rewards score the answers", Residency(reward_model=True), False
    LOGPROB = "LOGPROB", "policy and reference compute logprobs", TRAINER, True
    TRAIN = "TRAIN", "the policy is updated", replace(TRAINER, gradients=True, optimizer=True), True
    # The engine takes its weights while the policy's are on the device; its cache would not fit beside them.
    SYNC = "SYNC", "new weights go to the engines", replace(TRAINER, engine_weights=True), True
    # The engine computes logprobs to be compared; the policy's were computed while its weights were there.
    CHECK = "CHECK", "the engines' logprobs are compared with the policy's", GENERATION, True
    # The engine keeps the weights that the next step generates with: no sync is between, and what it gives up is lost.
    SAVE = "SAVE", "a checkpoint is written", replace(TRAINER, engine_weights=True), False
    EVAL = "EVAL", "held-out prompts are answered", GENERATION, False
