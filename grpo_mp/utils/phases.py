"""Phases of a step: name, description, what resides on the device, and whether the time counts as work."""

from dataclasses import dataclass, replace
from enum import StrEnum

GIB = 2**30  # bytes
WAIT = "WAIT"  # span: a rank waits for other ranks, inside a phase or between phases
SAVE_WAIT = "SAVE_WAIT"  # span: the loop waits until the previous checkpoint is written
WEIGHT_CHECK = "WEIGHT_CHECK"  # span: the phases that compare logprobs of engines and policy after a weight sync
MOVE = "MOVE"  # span: weights and optimizer state are offloaded and onloaded at the start of a phase


@dataclass(frozen=True)
class Residency:
    """Items on the device in a phase. All other items of the trainer are offloaded, those of the engine are freed."""

    communicators: bool = False  # the first field, because onloading the following items may use NCCL
    policy_weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    engine_weights: bool = False
    engine_cache: bool = False
    reward_model: bool = False  # reward models and teacher that the job itself serves


TRAINER = Residency(communicators=True, policy_weights=True)
GENERATION = Residency(engine_weights=True, engine_cache=True)


class Phase(StrEnum):
    """Part of a step in which either the engines or the policy compute."""

    description: str
    resident: Residency
    is_work: bool  # False: the time of the phase counts as overhead

    def __new__(cls, value: str, description: str, resident: Residency, is_work: bool) -> "Phase":
        phase = str.__new__(cls, value)
        phase._value_ = value
        phase.description = description
        phase.resident = resident
        phase.is_work = is_work
        return phase

    GENERATE = "GENERATE", "the engines write answers", GENERATION, True
    SCORE = "SCORE", "the rewards score the answers", Residency(reward_model=True), False
    LOGPROB = "LOGPROB", "policy and reference compute logprobs", TRAINER, True
    TRAIN = "TRAIN", "the policy is updated", replace(TRAINER, gradients=True, optimizer=True), True
    # Both copies of the weights are on the device; the KV cache would not fit beside them.
    SYNC = "SYNC", "new weights go to the engines", replace(TRAINER, engine_weights=True), True
    # Only the engine computes logprobs here; the policy's were computed before its weights were offloaded.
    CHECK = "CHECK", "the engines' logprobs are compared with the policy's", GENERATION, True
    # The engine keeps its weights: freed weights are lost, and no weight sync comes before the next GENERATE.
    SAVE = "SAVE", "a checkpoint is written", replace(TRAINER, engine_weights=True), False
    EVAL = "EVAL", "held-out prompts are answered", GENERATION, False
