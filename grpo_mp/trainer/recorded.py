"""Recorded groups of a killed or stopped job, for the job that resumes the run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, count
from pathlib import Path

import torch.distributed as dist

from grpo_mp.batching.group_selection import AdmissionRule, Verdict, admit
from grpo_mp.distributed.process_groups import Job, all_gather
from grpo_mp.rollout.journal import Extent, GroupKey, Record, best_records, read_records


class RecordedGroups:
    """Recorded groups that no step has used yet: the records of this rank's share, and the extents of all groups."""

    def __init__(self, own: Iterable[Record], all_ranks: Mapping[GroupKey, Extent]) -> None:
        self._own = {record.key: record for record in own}
        self._all = dict(all_ranks)

    @classmethod
    def read(
        cls, folder: Path, place: int | None, readers: int, group: dist.ProcessGroup, steps: str = "step_*"
    ) -> "RecordedGroups":
        """Read the files of all ranks, divided among `readers` ranks; this rank is reader `place`, or None.

        `steps`: pattern of the step folders. Of several records of a group, the most complete record is used; records
        with different episodes of the group are joined.
        """
        files = sorted(folder.glob(f"{steps}/*.journal"))
        own = [] if place is None else [r for file in files[place::readers] for r in read_records(file)]
        rank = dist.get_rank(group)
        by_rank = all_gather(own, group)
        readers_of = {(r.file, r.offset): reader for reader, records in enumerate(by_rank) for r in records}
        # Sort by time of writing: of two records of an episode, the older record is taken.
        everyones = sorted(chain.from_iterable(by_rank), key=lambda record: (record.file, record.offset))
        best = best_records(everyones)
        mine = [record for record in best.values() if readers_of[record.file, record.offset] == rank]
        return cls(mine, {key: record.extent for key, record in best.items()})

    def take(self, first: int, rule: AdmissionRule, prompt_of: Callable[[int], tuple[int, int]]) -> dict[int, Record]:
        """Remove and return this rank's records of the groups that a step may launch, by launch number.

        `first`: id of the step's first group; `prompt_of`: launch number -> index and epoch of the prompt.
        """
        last = max((key[0] for key in self._all), default=-1)
        taken = dict[int, Record]()
        verdicts: list[Verdict] = []
        for number in count():
            admission = admit(verdicts, rule)
            beyond = number >= admission.launch_limit + rule.lookahead or (admission.done and not rule.lookahead)
            if beyond or first + number > last:
                break
            key = (first + number, *prompt_of(number))
            if extent := self._all.pop(key, None):
                if extent.finished:
                    verdicts.append((number, extent.kept))
                if record := self._own.pop(key, None):
                    taken[number] = record
        self._all = {key: extent for key, extent in self._all.items() if key[0] >= first}
        return taken


def read_recorded(folder: Path, host_ranks: Sequence[int], job: Job) -> RecordedGroups:
    """Read the groups recorded by an earlier job, divided among the ranks that host engines."""
    place = host_ranks.index(job.rank) if job.rank in host_ranks else None
    return RecordedGroups.read(folder, place, len(host_ranks), job.group)
