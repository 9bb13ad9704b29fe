"""What failures cost that end a job: the share of a run's time that trains. Pure.

A killed job is started again, reads its newest whole checkpoint, and repeats the steps since: it trains on the groups
that they recorded (rollout/journal.py) and generates only what is missing. Failures of an engine alone end no job; they
are part of a simulated step.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

from grpo_mp.errors import UserError

MAX_FAILURES = 50_000
SAVE_EVERY = (1, 2, 5, 10, 20, 50)


@dataclass(frozen=True)
class UnreliableJob:
    """A job in seconds. Failures of each kind come at random, independently of each other and of the past.

    `generate_s`, `train_s`: a step's generation, and the rest, which alone a repeated step takes again; `in_flight_s`:
    of generation, what is not recorded yet when the job ends; `save_s`: of a checkpoint, while the job waits;
    `write_s`: from then until it is whole; `restart_s`: from a failure until the job is where its checkpoint is;
    `mtbf_s`: mean time between failures of the whole job, by kind; `repaired`: by kind, the share of failures after
    which a host is away for `repair_s`; `spares`: hosts that take its place.
    """

    generate_s: float
    train_s: float
    in_flight_s: float = 0.0
    save_s: float = 0.0
    write_s: float = 0.0
    restart_s: float = 0.0
    mtbf_s: Mapping[str, float] = field(default_factory=dict)
    repaired: Mapping[str, float] = field(default_factory=dict)
    spares: int = 0
    repair_s: float = 0.0
    save_every: int = 20
    steps: int = 20_000
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise UserError for what no job can do."""
        if self.save_every < 1:
            raise UserError(
                "failures: a job without checkpoints begins anew each time: set run.save_every to 1 or more"
            )

    @property
    def step_s(self) -> float:
        """Return the seconds of an undisturbed step."""
        return self.generate_s + self.train_s


@dataclass
class FailureCost:
    """Where the seconds of a run went. `lost`: by what they were lost to; `failures`: by kind."""

    job: UnreliableJob
    total_s: float = 0.0
    lost: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def effective_share(self) -> float:
        """Return the share of the time in which steps were done that counted."""
        return 1 - sum(self.lost.values()) / self.total_s


class _Hosts:
    """Spares, and the hosts that are being repaired."""

    def __init__(self, spares: int, repair_s: float) -> None:
        self._spares, self._repair_s = spares, repair_s
        self._back: list[float] = []

    def replace_at(self, now: float) -> float:
        """Return the seconds until another host takes the place of one that fails now."""
        heapq.heappush(self._back, now + self._repair_s)
        while self._back[0] <= now:
            heapq.heappop(self._back)
        missing = len(self._back) - self._spares
        return 0.0 if missing <= 0 else sorted(self._back)[missing - 1] - now


def play_failures(job: UnreliableJob) -> FailureCost:
    """Play a run until all its steps are done. Raises UserError where it fails too often to get there."""
    random, cost, hosts = Random(f"job failures {job.seed}"), FailureCost(job), _Hosts(job.spares, job.repair_s)
    kinds = {kind: 1 / mean_s for kind, mean_s in job.mtbf_s.items() if mean_s}

    def next_failure(now: float) -> float:
        return now + random.expovariate(sum(kinds.values())) if kinds else float("inf")

    now, done, generated = 0.0, 0, 0.0  # generated: steps, and the recorded part of the one that is not done
    checkpoints = [(0, 0.0)]  # step, and when it is whole
    fails_at = next_failure(now)
    while done < job.steps:
        generate_s = job.generate_s * min(1.0, 1.0 - min(1.0, generated - done))
        saves = (done + 1) % job.save_every == 0
        end = now + generate_s + job.train_s + job.save_s * saves
        if end <= fails_at:
            now, done = end, done + 1
            generated = max(generated, done)
            cost.lost["saves"] += job.save_s * saves
            if saves:
                checkpoints.append((done, now + job.write_s))
            continue
        recorded_s = min(max(0.0, fails_at - now - job.in_flight_s), generate_s)
        cost.lost["repeated"] += fails_at - now - recorded_s
        generated = max(generated, done) + (recorded_s / job.generate_s if recorded_s else 0.0)
        checkpoints = [max(item for item in checkpoints if item[1] <= fails_at)]
        cost.lost["repeated"] += (done - checkpoints[0][0]) * job.train_s
        done = checkpoints[0][0]
        (kind,) = random.choices(list(kinds), weights=list(kinds.values()))
        waiting_s = hosts.replace_at(fails_at) if random.random() < job.repaired.get(kind, 0.0) else 0.0
        cost.lost["waiting for a host"] += waiting_s
        cost.lost["restarts"] += job.restart_s
        cost.failures[kind] += 1
        if cost.failures.total() > MAX_FAILURES:
            raise UserError(f"a job that fails every {1 / sum(kinds.values()):,.0f} s never ends: save more often")
        now = fails_at + waiting_s + job.restart_s
        fails_at = next_failure(now)
    cost.total_s = now
    return cost


def compare_save_every(job: UnreliableJob) -> list[FailureCost]:
    """Play the run with other numbers of steps between checkpoints, too."""
    return [play_failures(replace(job, save_every=every)) for every in sorted({*SAVE_EVERY, job.save_every})]
