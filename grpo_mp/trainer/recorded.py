"""Groups that a killed or stopped job has generated, given to the one that resumes it."""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, count
from pathlib import Path

import torch.distributed as dist

from grpo_mp.batching.group_selection import AdmissionRule, Verdict, admit
from grpo_mp.checkpoint.run_state import ROLLOUTS
from grpo_mp.config import Settings
from grpo_mp.data.prompts import PromptSet
from grpo_mp.distributed.process_groups import Job, all_gather, broadcast
from grpo_mp.rollout.journal import Extent, GroupKey, Record, best_records, read_records
from grpo_mp.utils.files import read_json, write_json
from grpo_mp.utils.user_code import file_digests

INPUTS = "code.json"  # beside the groups: checksums of the users' files that had a part in them, and of the data
DATA = "data.train"


def drop_groups_of_changed_inputs(settings: Settings, train: PromptSet, job: Job) -> list[str]:
    """Remove all recorded groups if users' code or the data have changed; return a sentence where that was so.

    Losses and filters count, too: the weights of repeated steps follow from them.
    """
    sentences: list[str] = []
    if job.rank == 0:
        folder = settings.run.folder / ROLLOUTS
        before = read_json(folder / INPUTS)
        now = file_digests(settings.model_dump(mode="json", exclude={"monitor", "sample"})) | {DATA: train.digest}
        changed = [name for name in before if name in now and before[name] != now[name]]
        steps = [path for path in folder.iterdir() if path.is_dir()] if changed else []
        for path in steps:
            shutil.rmtree(path)
        if steps:
            sentences = [
                f"{', '.join(changed)} changed since {folder} was written: recorded groups are generated again"
            ]
        if before != now:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / INPUTS, now)
    return broadcast(sentences, job.group)


class RecordedGroups:
    """The groups on disk that no step has taken up: this rank's share of them, and the verdicts on all."""

    def __init__(self, own: Iterable[Record], all_ranks: Mapping[GroupKey, Extent]) -> None:
        self._own, self._all = {record.key: record for record in own}, dict(all_ranks)

    @classmethod
    def read(
        cls, folder: Path, place: int | None, readers: int, group: dist.ProcessGroup, steps: str = "step_*"
    ) -> "RecordedGroups":
        """Divide all ranks' files among `readers`, of which this rank is number `place`.

        `steps`: folders to read. Of several records of a group the most complete one counts, or all with episodes.
        """
        files = sorted(folder.glob(f"{steps}/*.journal"))
        own = [] if place is None else [r for file in files[place::readers] for r in read_records(file)]
        rank, by_rank = dist.get_rank(group), all_gather(own, group)
        readers_of = {(r.file, r.offset): reader for reader, records in enumerate(by_rank) for r in records}
        # In the order in which they were written: of an episode that has two records the older one is taken.
        everyones = sorted(chain.from_iterable(by_rank), key=lambda record: (record.file, record.offset))
        best = best_records(everyones)
        mine = [record for record in best.values() if readers_of[record.file, record.offset] == rank]
        return cls(mine, {key: record.extent for key, record in best.items()})

    def count(self, first: int) -> int:
        return sum(key[0] >= first for key in self._all)

    def take(self, first: int, rule: AdmissionRule, prompt_of: Callable[[int], tuple[int, int]]) -> dict[int, Record]:
        """Remove and return this rank's records of what a step may launch, by number in its launch order.

        `first`: the id of the step's first group; `prompt_of`: index and epoch of the prompt with a number.
        """
        last, taken = max((key[0] for key in self._all), default=-1), dict[int, Record]()
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
    """Read what a former job has recorded, divided among the ranks that host engines."""
    place = host_ranks.index(job.rank) if job.rank in host_ranks else None
    return RecordedGroups.read(folder, place, len(host_ranks), job.group)
