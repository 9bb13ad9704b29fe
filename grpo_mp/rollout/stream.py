"""Distribution of a step's groups over all engines: claims of group numbers, and verdicts on finished groups."""

import asyncio
from collections.abc import Callable, Iterable

import torch.distributed as dist

from grpo_mp.batching.group_selection import Admission, AdmissionRule, Verdict, admit
from grpo_mp.distributed.rendezvous import has_failed
from grpo_mp.utils.errors import UserError

POLL_S = 0.02
MARKS = {True: "+", False: "-", None: "x"}
VERDICTS = {mark: verdict for verdict, mark in MARKS.items()}


class GroupStream:
    """Group numbers in launch order, each claimed by exactly one engine, and the verdicts on ended groups.

    A verdict is whether the group filter keeps a group. The state is in the job's store; `name`: prefix of the keys,
    unique for each stream.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        rule: AdmissionRule,
        engines: int = 1,
    ) -> None:
        self.check_peers: Callable[[], None] = lambda: None  # raises if another generating rank has died
        self._engines = engines
        self._attempt = 0
        self._seen = 0
        self._store = store
        self._key = f"stream/{name}"
        self.rule = rule
        self._append(" ")  # reading a missing key would block
        self._store.append(f"{self._key}/ahead", " ")  # type: ignore[attr-defined]  # torch's stubs lack it

    def claim(self) -> int:
        """Claim and return the next group number; `LaunchGate` decides when the group may be launched."""
        return int(self._store.add(f"{self._key}/claimed", 1)) - 1

    def give_back(self, numbers: Iterable[int]) -> None:
        """Offer claimed groups to other engines."""
        for number in numbers:
            place = int(self._store.add(f"{self._key}/returned", 1)) - 1
            self._store.set(f"{self._key}/returned/{place}", str(number))

    def take_returned(self) -> int | None:
        """Claim and return a group that an engine gave back; None if there is none."""
        while self._seen < int(self._store.add(f"{self._key}/returned", 0)):
            key = f"{self._key}/returned/{self._seen}"
            self._seen = self._seen + 1
            if self._store.add(f"{key}/taken", 1) == 1:
                return int(self._store.get(key))
        return None

    def report_lost(self) -> None:
        """Report that this rank's engine is lost and launches no more groups."""
        self._store.add(f"{self._key}/lost/{self._attempt}", 1)

    def all_lost(self) -> bool:
        """Return whether all engines were lost in the current attempt."""
        return int(self._store.add(f"{self._key}/lost/{self._attempt}", 0)) >= self._engines

    def has_lost(self) -> bool:
        """Return whether an engine was lost in the current or an earlier attempt."""
        attempts = range(self._attempt + 1)
        return any(int(self._store.add(f"{self._key}/lost/{attempt}", 0)) > 0 for attempt in attempts)

    def try_again(self) -> "GroupStream":
        """Begin another attempt at the step with restarted engines; return self."""
        self._attempt = self._attempt + 1
        self._seen = 0
        return self

    def report(self, number: int, kept: bool | None) -> None:
        """Report an ended group. `kept`: whether the group filter keeps the group; None: the group was aborted."""
        self._append(f"{number}{MARKS[kept]} ")
        self._store.add(f"{self._key}/reported", 1)

    def report_ahead(self, number: int) -> None:
        """Report that a later step's group has reached its token limit of this step."""
        self._store.append(f"{self._key}/ahead", f"{number} ")  # type: ignore[attr-defined]  # torch's stubs lack it
        self._store.add(f"{self._key}/reported", 1)

    def has_ahead(self, numbers: range) -> bool:
        """Return whether all these groups of later steps have ended or reached their token limit."""
        ahead = {int(number) for number in self._store.get(f"{self._key}/ahead").decode().split()}
        return not set(numbers) - ahead - {number for number, _ in self.verdicts()}

    def reported(self) -> int:
        """Return the number of reports so far. Raises UserError if another rank failed, whose groups never finish."""
        if has_failed(self._store):
            raise UserError("another rank failed")
        self.check_peers()
        return int(self._store.add(f"{self._key}/reported", 0))

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts as (group number, kept) in the order of their reports."""
        entries = dict.fromkeys(self._store.get(f"{self._key}/verdicts").decode().split())
        return [(int(entry[:-1]), VERDICTS[entry[-1]]) for entry in entries]

    def admission(self) -> Admission:
        return admit(self.verdicts(), self.rule)

    def is_done(self, ahead: int) -> bool:
        """Return whether the step has enough groups and the next `ahead` groups have ended or reached their limit."""
        admission = self.admission()
        return admission.done and self.has_ahead(range(admission.launch_limit, admission.launch_limit + ahead))

    def _append(self, text: str) -> None:
        self._store.append(f"{self._key}/verdicts", text)  # type: ignore[attr-defined]  # torch's stubs lack it


class LaunchGate:
    """Decides for one engine when a group may be launched and when the step is done."""

    def __init__(
        self,
        stream: GroupStream,
        lookahead: Callable[[], int],
        stopped: Callable[[], bool] = lambda: False,
        waits_for_ahead: bool = False,
    ) -> None:
        """Read the stream once; `watch` polls it.

        `lookahead`: number of groups of later steps that may be launched now; `stopped`: whether the job is shutting
        down; `waits_for_ahead`: whether the step also waits until groups of later steps reach their token limits.
        """
        self._stream = stream
        self._changed = asyncio.Condition()
        self._lookahead = lookahead
        self._stopped = stopped
        self._waits_for_ahead = waits_for_ahead
        self._read()

    @property
    def done(self) -> bool:
        return (self._admission.done and self._has_ahead) or self._all_lost or self._stopped()

    async def watch(self) -> None:
        """Poll the stream until the step is done."""
        while not self.done:
            await asyncio.sleep(POLL_S)
            if self._stream.all_lost() or self._stopped():
                async with self._changed:
                    self._all_lost = self._stream.all_lost()
                    self._changed.notify_all()
            reported = self._stream.reported()
            ahead = self._lookahead()
            if (reported, ahead) == (self._reported, self._ahead):
                continue  # reading all verdicts of a large evaluation is slow: do it only after a new report
            async with self._changed:
                self._read()
                self._changed.notify_all()

    def _read(self) -> None:
        self._reported = self._stream.reported()
        self._ahead = self._lookahead()
        self._admission = self._stream.admission()
        self._all_lost = self._stream.all_lost()
        limit = self._admission.launch_limit
        self._has_ahead = not self._waits_for_ahead or self._stream.has_ahead(range(limit, limit + self._ahead))

    def is_own(self, number: int) -> bool:
        """Return whether a group belongs to this step rather than a later step."""
        return number < self._admission.launch_limit

    def allows(self, number: int) -> bool:
        """Return whether a group may be launched now."""
        return number < self._admission.launch_limit + self._ahead

    async def when_allowed(self, number: int) -> int | None:
        """Wait until group `number` may be launched and return `number`; return None if the step is done first."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.done or self.allows(number))
        return None if self.done else number
