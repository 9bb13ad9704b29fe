"""The phases, what is resident on the device in each, and the moves between them. Pure data."""

from dataclasses import dataclass, fields
from enum import StrEnum


class Phase(StrEnum):
    """A stretch of a step in which one side computes."""

    GENERATE = "GENERATE"
    SCORE = "SCORE"
    LOGPROB = "LOGPROB"
    TRAIN = "TRAIN"
    SYNC = "SYNC"
    CHECK = "CHECK"
    SAVE = "SAVE"
    EVAL = "EVAL"


@dataclass(frozen=True)
class Residency:
    """What occupies the device. Everything else of the trainer waits on the host; the engine's is given up."""

    policy_weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    engine_weights: bool = False
    engine_cache: bool = False


GENERATING = Residency(engine_weights=True, engine_cache=True)
RESIDENT: dict[Phase, Residency] = {
    Phase.GENERATE: GENERATING,
    Phase.EVAL: GENERATING,
    Phase.SCORE: GENERATING,
    Phase.LOGPROB: Residency(policy_weights=True),
    Phase.TRAIN: Residency(policy_weights=True, gradients=True, optimizer=True),
    # The engine takes its weights while the policy's are on the device; its cache would not fit beside them.
    Phase.SYNC: Residency(policy_weights=True, engine_weights=True),
    # The engine computes logprobs to be compared; the policy's were computed while its weights were there.
    Phase.CHECK: GENERATING,
    Phase.SAVE: Residency(policy_weights=True, optimizer=True),
}


@dataclass(frozen=True)
class Move:
    """One thing leaves the device (`wake` False) or comes back to it."""

    what: str  # a field of Residency
    wake: bool


def moves(now: Residency, wanted: Residency) -> tuple[Move, ...]:
    """The moves from one residency to another: everything that leaves goes before anything comes."""
    names = [field.name for field in fields(Residency)]
    held, needed = ({name for name in names if getattr(side, name)} for side in (now, wanted))
    leaving = [Move(name, wake=False) for name in names if name in held - needed]
    coming = [Move(name, wake=True) for name in names if name in needed - held]
    return (*leaving, *coming)
