"""What failures of engines cost: a run with enough of them beside the same run without. Pure."""

from dataclasses import replace

from grpo_mp.simulation.loop import simulate, simulate_until_settled
from grpo_mp.simulation.scenario import Outcome, Scenario, Totals

FAILURES = 64  # of engines: what one costs is then known to a few percent


def simulate_with_failures(scenario: Scenario) -> Outcome:
    """Play a run until its steps are settled and, where engines fail, until enough of them have."""
    quiet = simulate_until_settled(replace(scenario, engine_mtbf_s=0.0))
    return with_engine_failures(quiet, scenario.engine_mtbf_s)


def with_engine_failures(quiet: Outcome, mtbf_s: float) -> Outcome:
    """Return the mean step of a run whose engines fail every `mtbf_s` seconds each, where `quiet` is the run without.

    The totals and the seconds are those of one step: of `quiet`, and what failures change. That is the difference of
    two runs that deal the same lengths, so that these are not taken for a cost of failures, over all steps with and
    between failures, played or skipped. So rare failures cost what they do, however few steps `quiet` has.
    """
    if not mtbf_s:
        return quiet
    failing = replace(quiet.scenario, engine_mtbf_s=mtbf_s)
    played = simulate(replace(failing, engine_failures=FAILURES, quiet_step_s=quiet.step_s))
    alike = simulate(replace(quiet.scenario, steps=played.played_steps))
    steps = played.played_steps + played.after.skipped_s / quiet.step_s
    mean = Totals().plus(quiet.after, 1 / (len(quiet.ends) - 1)).plus(quiet.before, -1 / (len(quiet.ends) - 1))
    changed = mean.plus(played.after, 1 / steps).plus(alike.after, -1 / steps)
    step_s = quiet.step_s + (played.after.now - alike.after.now) / steps
    return Outcome(failing, Totals(), changed, (0.0, step_s))
