"""The groups of one step over all engines: claims, verdicts, and when the step has enough."""

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
    """Group numbers in launch order, each claimed by exactly one engine, and the verdicts on the groups.

    The state is in the job's store, where `name` must be new.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        rule: AdmissionRule,
        engines: int = 1,
    ) -> None:
        self.check_peers: Callable[[], None] = lambda: None  # raises where a rank that generates has gone
        self._engines, self._attempt, self._seen = engines, 0, 0
        self._store, self._key, self.rule = store, f"stream/{name}", rule
        self._append(" ")  # a key that does not exist cannot be read
        self._store.append(f"{self._key}/ahead", " ")  # type: ignore[attr-defined]  # torch's stubs lack it

    def claim(self) -> int:
        """Claim the next number; `LaunchGate` decides when it may be launched."""
        return int(self._store.add(f"{self._key}/claimed", 1)) - 1

    def give_back(self, numbers: Iterable[int]) -> None:
        """Give claimed groups to other engines."""
        for number in numbers:
            place = int(self._store.add(f"{self._key}/returned", 1)) - 1
            self._store.set(f"{self._key}/returned/{place}", str(number))

    def take_returned(self) -> int | None:
        """Claim a group that was given back; None where there is none."""
        while self._seen < int(self._store.add(f"{self._key}/returned", 0)):
            key, self._seen = f"{self._key}/returned/{self._seen}", self._seen + 1
            if self._store.add(f"{key}/taken", 1) == 1:
                return int(self._store.get(key))
        return None

    def report_lost(self) -> None:
        """Report that an engine launches no more groups."""
        self._store.add(f"{self._key}/lost/{self._attempt}", 1)

    def all_lost(self) -> bool:
        """Return whether no engine is left."""
        return int(self._store.add(f"{self._key}/lost/{self._attempt}", 0)) >= self._engines

    def has_lost(self) -> bool:
        """Return whether an engine was lost, in this attempt or an earlier one."""
        attempts = range(self._attempt + 1)
        return any(int(self._store.add(f"{self._key}/lost/{attempt}", 0)) > 0 for attempt in attempts)

    def try_again(self) -> "GroupStream":
        """Begin another attempt with restarted engines. Every rank must call this."""
        self._attempt, self._seen = self._attempt + 1, 0
        return self

    def report(self, number: int, kept: bool | None) -> None:
        """Report an ended group, and whether the filter keeps it; None: it was aborted."""
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
        """Return the number of reports. Raises UserError where another rank failed, whose groups never come."""
        if has_failed(self._store):
            raise UserError("another rank failed")
        self.check_peers()
        return int(self._store.add(f"{self._key}/reported", 0))

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts in the order of their reports, the first of each group."""
        entries = dict.fromkeys(self._store.get(f"{self._key}/verdicts").decode().split())
        return [(int(entry[:-1]), VERDICTS[entry[-1]]) for entry in entries]

    def admission(self) -> Admission:
        return admit(self.verdicts(), self.rule)

    def is_done(self, ahead: int) -> bool:
        """Return whether the step has its groups, and the next `ahead` groups have ended or reached their limit."""
        admission = self.admission()
        return admission.done and self.has_ahead(range(admission.launch_limit, admission.launch_limit + ahead))

    def _append(self, text: str) -> None:
        self._store.append(f"{self._key}/verdicts", text)  # type: ignore[attr-defined]  # torch's stubs lack it


class LaunchGate:
    """Tells one engine when a number may be launched, and when the step has its groups."""

    def __init__(
        self,
        stream: GroupStream,
        lookahead: Callable[[], int],
        stopped: Callable[[], bool] = lambda: False,
        waits_for_ahead: bool = False,
    ) -> None:
        """Read the stream once; `watch` keeps reading it.

        `lookahead`: groups of later steps that may be launched now; `stopped`: whether the job ends;
        `waits_for_ahead`: whether the step also waits for the token limits of later groups.
        """
        self._stream, self._changed, self._lookahead, self._stopped = stream, asyncio.Condition(), lookahead, stopped
        self._waits_for_ahead = waits_for_ahead
        self._read()

    @property
    def done(self) -> bool:
        return (self._admission.done and self._has_ahead) or self._all_lost or self._stopped()

    async def watch(self) -> None:
        """Read the stream until the step has its groups."""
        while not self.done:
            await asyncio.sleep(POLL_S)
            if self._stream.all_lost() or self._stopped():
                async with self._changed:
                    self._all_lost = self._stream.all_lost()
                    self._changed.notify_all()
            reported, ahead = self._stream.reported(), self._lookahead()
            if (reported, ahead) == (self._reported, self._ahead):
                continue  # a large evaluation has many verdicts: they are read only when there is a new one
            async with self._changed:
                self._read()
                self._changed.notify_all()

    def _read(self) -> None:
        self._reported, self._ahead = self._stream.reported(), self._lookahead()
        self._admission, self._all_lost = self._stream.admission(), self._stream.all_lost()
        limit = self._admission.launch_limit
        self._has_ahead = not self._waits_for_ahead or self._stream.has_ahead(range(limit, limit + self._ahead))

    def is_own(self, number: int) -> bool:
        """Return whether a group belongs to this step, not to a later one."""
        return number < self._admission.launch_limit

    def allows(self, number: int) -> bool:
        return number < self._admission.launch_limit + self._ahead

    async def may_launch(self, number: int) -> bool:
        """Wait until a number may be launched; return False where the step is done before."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.done or self.allows(number))
        return not self.done
