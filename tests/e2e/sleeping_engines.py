"""The trainer, whose engines sleep and wake as on a GPU, where a CPU has nothing to free. Run under torchrun.

The trace has a span SLEEP or WAKE wherever a rank lets its engine give up memory or take it back.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from grpo_mp import evaluate
from grpo_mp.monitor.timeline import Timeline
from grpo_mp.policy.policy import Policy
from grpo_mp.rollout.rollout import Rollout
from grpo_mp.train import main
from grpo_mp.trainer.job import Monitors
from grpo_mp.trainer.offload import engine_functions
from grpo_mp.trainer.phase_manager import OffloadFunction, PhaseManager
from grpo_mp.utils.phases import GENERATION, Residency

ROLLOUTS: list[Rollout] = []


def make_rollout(*parts: Any, **more: Any) -> Rollout:
    ROLLOUTS.append(Rollout(*parts, **more))
    return ROLLOUTS[-1]


def make_phases(monitors: Monitors, policy: Policy, critic: None, limit_s: float, *_: Any) -> PhaseManager:
    """Make phases that move the engine, and nothing of the policy."""
    functions = engine_functions(ROLLOUTS[-1], policy.parallel.job.group)
    engine = {part: partial(move, monitors.timeline, function) for part, function in functions.items()}
    parts = (monitors.timeline, monitors.watchdog, monitors.progress, limit_s)
    return PhaseManager(*parts, {**dict.fromkeys(vars(Residency()), stay), **engine}, GENERATION)


def move(timeline: Timeline, function: OffloadFunction, onload: bool) -> None:
    with timeline.span("WAKE" if onload else "SLEEP"):
        function(onload)


def stay(onload: bool) -> None:
    """Move nothing."""


if __name__ == "__main__":
    patched: dict[str, Callable[..., Any]] = {"make_phases": make_phases, "Rollout": make_rollout}
    vars(evaluate).update(patched)
    main()
