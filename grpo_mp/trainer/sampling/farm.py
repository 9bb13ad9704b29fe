"""Generate and record answers to all prompts, in rounds that bound memory; rounds overlap, so engines stay busy."""

import threading
import time
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass, field, replace

from grpo_mp.batching.group_selection import AdmissionRule
from grpo_mp.config.sections import EngineConfig, RolloutConfig
from grpo_mp.distributed.peers import watching_peers
from grpo_mp.distributed.process_groups import all_gather
from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.rollout.groups import EndedGroup, LaunchedGroups, RunningGroup
from grpo_mp.rollout.journal import GroupJournal
from grpo_mp.rollout.rollout import rollout_sampling
from grpo_mp.rollout.stream import GroupStream
from grpo_mp.rollout.worker import RolloutTask
from grpo_mp.trainer.engines import Engines
from grpo_mp.trainer.sampling.filters import response_tokens
from grpo_mp.utils.errors import DiskError
from grpo_mp.utils.phases import Phase
from grpo_mp.utils.types import Prompt, SampleGroup

ROUNDS_AHEAD = 3  # rounds that engines may begin early while a long answer still runs
GROUPS_A_FILE = 2**12  # groups per journal file


@dataclass
class Throughput:
    """Numbers of generated prompts, samples and tokens, and the time taken."""

    prompts: int = 0
    samples: int = 0
    tokens: int = 0  # generated
    seconds: float = 0.0  # total time of the rounds
    engines: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, float]:
        return asdict(self) | {"tokens_per_s": self.tokens_per_s}


@dataclass
class SampleFarm:
    """Generates the answers to all prompts on all engines of the job. Group i belongs to prompt i."""

    config: EngineConfig
    rollout: RolloutConfig
    prompts: Sequence[Prompt]
    engines: Engines
    journal: GroupJournal
    seed: int | None = None  # see rollout_seed
    own: Throughput = field(default_factory=Throughput)  # of this rank's engine
    _running: LaunchedGroups = field(default_factory=dict, init=False)  # by prompt
    _ended: set[int] = field(default_factory=set, init=False)  # prompts answered in this round by this rank
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def run(self, done: Set[int]) -> Throughput:
        """Generate groups for all prompts not in `done`, without those that time out; return the throughput."""
        job = self.engines.job
        done = set(done)
        size = self.config.most_groups(self.rollout) * len(self.engines.rollout.host_ranks)
        began_s = time.monotonic()
        # If a restarted engine gets its weights by a sync, all engines must be idle then: no group runs ahead.
        ahead = 0 if self.engines.recovery.weight_sync else size * ROUNDS_AHEAD
        total = Throughput(engines=len(self.engines.rollout.host_ranks))
        for first in range(0, len(self.prompts), size):
            prompts = range(first, min(first + size, len(self.prompts)))
            if done.issuperset(prompts):
                continue
            self._round(prompts, done, ahead)
            done.update(*all_gather(self._ended, job.group))
            self._ended = set()
            total = self._sum(time.monotonic() - began_s)
            self.engines.monitors.progress.note(
                f"{prompts.stop:,} of {len(self.prompts):,} prompts; {total.tokens_per_s:,.0f} tokens/s"
            )
        return total

    def _round(self, prompts: range, done: Set[int], ahead: int) -> None:
        """Generate the groups of `prompts`; engines with free slots begin up to `ahead` later groups."""
        engines = self.engines
        first = prompts.start
        ahead = min(ahead, len(self.prompts) - prompts.stop)
        window = range(first, prompts.stop + ahead)
        rule = AdmissionRule(len(prompts), len(prompts), len(prompts), lookahead=ahead)
        stream = GroupStream(engines.job.store, f"sample/{first}", rule, len(engines.rollout.host_ranks))
        running = frozenset().union(*all_gather(set(self._running), engines.job.group))
        task = RolloutTask(
            lambda number: self.prompts[first + number],
            self.rollout.group_size,
            first_group_id=first,
            step=0,
            sampling=rollout_sampling(self.rollout),
            carried={prompt - first: group for prompt, group in self._running.items()},
            carried_by_all=frozenset(prompt - first for prompt in window if prompt in done or prompt in running),
            lookahead=lambda: ahead,
            pauses=False,
            seed=self.seed,
            record=self._record,
            forgets=True,
        )
        if engines.job.rank == 0:
            for prompt in done & set(prompts):
                stream.report(prompt - first, kept=True)
        launched = self._generate(stream, task)
        self._running = {first + n: group for n, group in launched.items() if isinstance(group, RunningGroup)}
        self._ended |= {first + n for n, group in launched.items() if isinstance(group, SampleGroup)}

    def _generate(self, stream: GroupStream, task: RolloutTask) -> LaunchedGroups:
        """Generate until the round is answered, restarting lost engines; return this rank's launched groups."""
        engines = self.engines
        engines.recovery.begin_step()
        while True:
            detail = f"prompts {task.first_group_id:,} to {task.first_group_id + stream.rule.needed - 1:,}"
            with engines.phases.phase(Phase.GENERATE, detail), watching_peers(engines.job.group) as check_peers:
                stream.check_peers = check_peers
                launched = engines.rollout.begin(task, stream).result()
                done = any(all_gather(stream.admission().done, engines.job.group))
            if done:
                return launched
            engines.recovery.run()  # all engines were lost
            stream = stream.try_again()
            task = replace(task, carried=launched)

    def _record(self, prompt: int, group: EndedGroup, stats: RewardStats) -> None:
        if not isinstance(group, SampleGroup):
            return
        (scored,) = self.engines.rollout.score([group], 0)
        if not self.journal.append(prompt // GROUPS_A_FILE, prompt, scored, stats, kept=True):
            raise DiskError(f"prompt {prompt}: its answers cannot be written, see the log: make room, and start again")
        with self._lock:
            self.own.prompts += 1
            self.own.samples += len(scored.samples)
            self.own.tokens += sum(map(response_tokens, scored.samples))

    def _sum(self, seconds: float) -> Throughput:
        with self._lock:
            own = replace(self.own)
        parts = all_gather(own, self.engines.job.group)
        sums = {name: sum(vars(part)[name] for part in parts) for name in ("prompts", "samples", "tokens")}
        return Throughput(**sums, seconds=seconds, engines=len(self.engines.rollout.host_ranks))
