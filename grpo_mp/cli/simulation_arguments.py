"""The arguments of `grpo-mp plan --simulate`. They need no torch."""

from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from grpo_mp.utils.parsers import (
    MAX_RANKS,
    Parser,
    count_up_to,
    number_between,
    number_of_ranks,
    number_of_steps,
    positive_int,
    share,
)

SCHEDULES = ("colocated", "one_step_off", "async")
FAILING = {
    "engine": "an engine",
    "gpu": "a GPU, which end the job",
    "host": "a host, for other reasons",
    "network": "a host's network",
}
MIN_MTBF_H, MAX_MTBF_H = 0.01, 1e7  # of one GPU: a failure every 36 s, or in more than a thousand years
MAX_RESTART_S = 1e6  # more than a week
MAX_REPAIR_H = 1e4  # more than a year
T = TypeVar("T")


def add_simulation_arguments(parser: Parser) -> None:
    """Add them in a group of their own."""
    group = parser.add_argument_group("simulation")
    group.add_argument("--simulate", action="store_true", help="play steps event by event, under each schedule")
    group.add_argument("--schedule", choices=SCHEDULES, help="only this one (default: all three)")
    group.add_argument("--gpus", type=list_of(number_of_ranks), help="8,64,4096: a table of these (default: --nodes)")
    group.add_argument(
        "--engine-gpus", type=positive_int, help="GPUs of the engines (default: engine.ranks, or the best division)"
    )
    group.add_argument(
        "--staleness", type=list_of(count_up_to(1000)), default=[0, 1, 2, 4], help="values of rollout.max_staleness"
    )
    group.add_argument("--lengths", type=Path, help="measured response lengths: a number a line, or a run's samples")
    group.add_argument("--response-sigma", type=number_between(0, 5), help="sigma of lognormal lengths (default: 1)")
    group.add_argument("--drop-rate", type=share, default=0.0, help="share that the filter drops, at most 0.999")
    group.add_argument(
        "--draft-tokens",
        type=count_up_to(64),
        help="tokens drafted for a step, by one layer (default: engine.speculative)",
    )
    for name, failing in FAILING.items():
        text = f"mean time between failures of {failing}; 0: none"
        group.add_argument(f"--{name}-mtbf-hours", type=mtbf_hours, default=0.0, metavar="HOURS", help=text)
    restart_s = number_between(0, MAX_RESTART_S)
    group.add_argument(
        "--engine-restart-s", type=restart_s, default=300.0, help="until a lost engine has started again"
    )
    group.add_argument("--restart-s", type=restart_s, default=300.0, help="until a killed job reads its checkpoint")
    group.add_argument(
        "--spares", type=count_up_to(MAX_RANKS), default=0, help="hosts that take the place of those that fail"
    )
    group.add_argument(
        "--repair-hours",
        type=number_between(0, MAX_REPAIR_H),
        default=24.0,
        help="mean time until a host is back that failed, or whose GPU did",
    )
    group.add_argument(
        "--gpu-repaired",
        type=number_between(0, 1),
        default=0.68,
        help="share of a GPU's failures that take its host away",
    )
    steps = "steps to play at least; the second half counts"
    group.add_argument("--steps", type=number_of_steps, default=16, help=steps)
    group.add_argument("--seed", type=int, default=0, help="of lengths, filter and failures")


def mtbf_hours(text: str) -> float:
    """Return mean hours between failures, 0 for none. Raises ArgumentTypeError for a number out of range, or none."""
    hours = number_between(0, MAX_MTBF_H)(text)
    if 0 < hours < MIN_MTBF_H:
        raise ArgumentTypeError(f"expected 0, or a number from {MIN_MTBF_H:g} to {MAX_MTBF_H:g}, got {text[:50]}")
    return hours


def list_of(item: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a type of arguments for `argparse`: items between commas."""

    def parse(text: str) -> list[T]:
        try:
            return [item(part) for part in text.split(",")]
        except ValueError as error:
            raise ArgumentTypeError(f"{text!r} is no list of numbers") from error

    return parse
