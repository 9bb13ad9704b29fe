"""What a simulated run is: its rates in seconds, its schedule and sizes; and what became of it."""

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import ceil
from statistics import fmean, linear_regression
from typing import Any, Literal

from grpo_mp.batching.group_selection import AdmissionRule
from grpo_mp.utils.errors import UserError

MAX_DROP_RATE = 0.999  # a step launches 1,000 groups for each that it trains on


class Schedule(StrEnum):
    """Who generates while the policy trains."""

    COLOCATED = "colocated"  # nobody: engines and trainer share their GPUs, in turn
    ONE_STEP_OFF = "one_step_off"  # engines, the next step; both then wait for each other, and for the weight sync
    ASYNC = "async"  # engines, always; weights are updated while they have samples in flight


@dataclass(frozen=True)
class Rates:
    """Seconds of what a run does: by the planner, or given by hand from measured figures.

    A decode step of an engine with b running sequences takes `decode_step_s` + b `sequence_s` + `cached_token_s` for
    each token in their cache + `experts_s` x the share of experts that any of them uses, 1 - `unused_expert`**b.
    """

    decode_step_s: float
    train_token_s: float  # logprobs, forward and backward, of a token of prompt or response
    sequence_s: float = 0.0
    cached_token_s: float = 0.0
    experts_s: float = 0.0
    unused_expert: float = 0.0  # chance that one token does not use an expert
    prefill_token_s: float = 0.0  # of an engine, which decodes nothing meanwhile
    update_s: float = 0.0  # optimizer, and what else a step takes whatever its tokens
    sync_s: float = 0.0  # weights to the engines: neither side works
    switch_s: float = 0.0  # a step's offloads, where engines and trainer share GPUs
    save_s: float = 0.0  # a step's share of the checkpoints

    def decode_s(self, batch: int, cached_tokens: float) -> float:
        """Return the seconds of one decode step of an engine."""
        experts = self.experts_s * (1 - self.unused_expert**batch)
        return self.decode_step_s + experts + batch * self.sequence_s + cached_tokens * self.cached_token_s

    def speculating(self, verified: int, drafting: float) -> "Rates":
        """Return the rates where a step verifies so many tokens of a sequence.

        `drafting`: cost of the step with its drafts over that without.
        """
        return replace(
            self,
            decode_step_s=self.decode_step_s * drafting,
            sequence_s=self.sequence_s * verified * drafting,
            cached_token_s=self.cached_token_s * drafting,
            experts_s=self.experts_s * drafting,
            unused_expert=self.unused_expert**verified,
        )


@dataclass(frozen=True)
class Scenario:
    """One run. `lengths`: response tokens, dealt to the samples in shuffled order, again and again.

    `acceptance_length`: tokens that a decode step yields for a sequence; above 1 by speculation, whose steps `rates`
    must describe. `engine_mtbf_s`: mean time between failures of one engine; 0: none fails. `engine_restart_s`: from
    then until it has started again and waits for weights. `engine_failures`: of all engines, to play at least, each
    with what follows from it. `quiet_step_s`: of a step without failures; where given, steps are counted instead of
    played in which no engine fails, and which no failure before changes.
    """

    schedule: Schedule
    rates: Rates
    lengths: tuple[int, ...]
    engines: int
    engine_gpus: int  # of all engines
    trainer_gpus: int  # with colocated the same ones
    slots: int  # sequences that an engine can run at a time
    concurrent_groups: int
    prompts_per_step: int
    group_size: int
    prompt_tokens: int = 0
    max_staleness: float = 0  # versions; a part of one allows that part of a step's groups
    oversample_factor: float = 1.0
    select_by: Literal["launch", "finish"] = "launch"  # by finish ages have no bound, and short answers are preferred
    drop_rate: float = 0.0  # of groups, by the filter, at most MAX_DROP_RATE; each is replaced
    acceptance_length: float = 1.0
    recompute_cache: bool = True  # of samples in flight, after an update of the weights
    engine_mtbf_s: float = 0.0
    engine_restart_s: float = 300.0
    engine_failures: int = 0
    quiet_step_s: float = 0.0  # 0: all steps are played
    steps: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise UserError for what no run can do."""
        if self.schedule is Schedule.ONE_STEP_OFF and self.max_staleness != 1:
            raise UserError(f"schedule {self.schedule}: samples are one version old: max_staleness is 1")
        if self.max_staleness < 0:
            raise UserError(f"max_staleness {self.max_staleness:g}: give 0 or more versions")
        if self.keeps_the_rest and self.oversample_factor > 1:
            raise UserError("over-sampling loses what max_staleness above 0 keeps for later steps: set one of them")
        if not 0 <= self.drop_rate < 1:
            raise UserError(f"drop rate {self.drop_rate:g}: the filter must keep some groups: give 0 or more, below 1")
        if self.drop_rate > MAX_DROP_RATE:
            raise UserError(
                f"drop rate {self.drop_rate:g}: a step would launch {1 / (1 - self.drop_rate):,.0f} groups for each "
                f"that the filter keeps, which takes too long to play: give {MAX_DROP_RATE} or less"
            )
        if not self.lengths or min(self.lengths) < 1:
            raise UserError("lengths: every response has at least one token, and there must be one")

    @property
    def colocated(self) -> bool:
        """Return whether engines and trainer share GPUs."""
        return self.schedule is Schedule.COLOCATED

    @property
    def keeps_the_rest(self) -> bool:
        """Return whether groups that a step does not train on are kept for later ones."""
        return self.max_staleness > 0

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return self.engine_gpus + (0 if self.colocated else self.trainer_gpus)

    @property
    def samples_per_step(self) -> int:
        """Return the samples that a step trains on."""
        return self.prompts_per_step * self.group_size

    @cached_property
    def admission_rule(self) -> AdmissionRule:
        """Return how many groups a step needs and may launch; what the filter drops is replaced without a limit."""
        launched = ceil(self.prompts_per_step * self.oversample_factor)
        most = sys.maxsize if self.drop_rate else launched
        return AdmissionRule(self.prompts_per_step, launched, most, self.select_by, self.lookahead(0))

    def lookahead(self, lag: int) -> int:
        """Return how many groups of later steps may begin by weights `lag` versions older than the step's.

        Negative: so many of the step itself may not.
        """
        return int(self.prompts_per_step * (self.max_staleness - lag))

    @cached_property
    def groups_in_flight(self) -> int:
        """Return the most groups that one engine has in flight, as the trainer sets it."""
        rule = self.admission_rule
        return max(1, min(self.concurrent_groups, -(-(rule.launched + rule.lookahead) // self.engines)))

    def train_s(self, tokens: float) -> float:
        """Return the seconds of a step's training on so many tokens."""
        rates = self.rates
        return tokens * rates.train_token_s + rates.update_s + rates.save_s + rates.switch_s * self.colocated

    @property
    def step_train_s(self) -> float:
        """Return the seconds of a step in which its policy trains on the mean tokens and sends its weights."""
        tokens = self.samples_per_step * (self.prompt_tokens + fmean(self.lengths))
        return self.train_s(tokens) + self.rates.sync_s

    @property
    def bound_s(self) -> float:
        """Return the seconds of a step without bubbles: no free slot, no tail, nothing lost, nobody waits."""
        rates, mean = self.rates, fmean(self.lengths)
        batch = min(self.slots, self.groups_in_flight * self.group_size)
        context = self.prompt_tokens + fmean(length**2 for length in self.lengths) / (2 * mean)
        sample_s = rates.decode_s(batch, batch * context) / batch * mean / self.acceptance_length
        sample_s += self.prompt_tokens / self.group_size * rates.prefill_token_s
        generate_s = self.samples_per_step / (1 - self.drop_rate) * sample_s / self.engines
        generate_s, train_s = generate_s + rates.sync_s, self.step_train_s
        return generate_s + train_s - rates.sync_s if self.colocated else max(generate_s, train_s)


@dataclass
class Totals:
    """What was counted so far. GPU-seconds are of all GPUs; tokens are of responses.

    Tokens and groups are `trained`; `dropped` by the filter; `lost`: broken off, not needed, or gone with an engine; or
    `unfinished`: they are of later steps.
    """

    now: float = 0.0
    idle_gpu_s: float = 0.0
    generated: float = 0.0
    tokens: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by what became of them
    failures: float = 0
    skipped_s: float = 0.0  # of steps that were counted instead of played; nothing else has them
    groups: Counter[str] = field(default_factory=Counter)  # and all as `launched`
    staleness: Counter[int] = field(default_factory=Counter)  # trained samples by versions since their first token

    def plus(self, other: "Totals", times: float) -> "Totals":
        """Return these totals with those of another run added so many times, all but what was skipped."""
        return Totals(
            self.now + times * other.now,
            self.idle_gpu_s + times * other.idle_gpu_s,
            self.generated + times * other.generated,
            defaultdict(float, _plus(self.tokens, other.tokens, times)),
            self.failures + times * other.failures,
            groups=Counter(_plus(self.groups, other.groups, times)),
            staleness=Counter(_plus(self.staleness, other.staleness, times)),
        )


def _plus(counts: Mapping[Any, float], other: Mapping[Any, float], times: float) -> Any:
    return {key: counts.get(key, 0) + times * other.get(key, 0) for key in {**counts, **other}}


@dataclass(frozen=True)
class Outcome:
    """A simulated run. Figures of a step are means over the second half of the steps, when the schedule has settled."""

    scenario: Scenario
    before: Totals  # at the middle
    after: Totals
    ends: tuple[float, ...]  # seconds at which steps were trained, from the middle on

    @property
    def played_steps(self) -> int:
        """Return the steps that were played: those of the scenario, or more until enough engines had failed."""
        return self.scenario.steps // 2 + len(self.ends) - 1

    @property
    def step_s(self) -> float:
        """Return the wall time of a step: the slope of a line through their ends, by least squares.

        Where steps come in cycles of several, the mean of those between two of them depends on which two.
        """
        return linear_regression(range(len(self.ends)), self.ends).slope

    @property
    def idle_share(self) -> float:
        """Return the share of GPU time in which a GPU has nothing to do, or its engine is down."""
        gpu_s = (self.after.now - self.before.now) * self.scenario.gpus
        return (self.after.idle_gpu_s - self.before.idle_gpu_s) / gpu_s

    @property
    def useful_share(self) -> float:
        """Return the share of generated tokens that are not lost, of the whole run."""
        return 1 - self.after.tokens["lost"] / self.after.generated

    @property
    def lost_tokens(self) -> float:
        """Return the generated tokens that a step loses."""
        return (self.after.tokens["lost"] - self.before.tokens["lost"]) / (len(self.ends) - 1)

    @property
    def samples_per_s(self) -> float:
        """Return the samples trained on in a second."""
        return self.scenario.samples_per_step / self.step_s

    @property
    def staleness(self) -> Counter[int]:
        """Return the trained samples by their age in versions."""
        return self.after.staleness - self.before.staleness

    @property
    def mean_staleness(self) -> float:
        """Return the mean age of a trained sample in versions."""
        return sum(age * count for age, count in self.staleness.items()) / self.staleness.total()

    @property
    def share_of_bound(self) -> float:
        """Return the share of the speed without bubbles."""
        return self.scenario.bound_s / self.step_s
