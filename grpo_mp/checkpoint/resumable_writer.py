"""Write a folder in parts, so that a conversion that was killed can be resumed.

The folder is called NAME.incomplete until all parts are written. A part gets its final name only when it is on disk,
so a file under its final name is complete, and a restart repeats only the parts that were being written.
"""

import hashlib
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from grpo_mp.checkpoint.hf_writer import incomplete_folder
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import read_json, sync_to_disk, write_json

CONVERSION_RECORD = "conversion.json"  # file with the fingerprint of the source files and the source folder
SOURCE_FOLDER = "source_folder"  # key of the record: path of the Hugging Face folder that was converted
PART_BYTES = 2**29
UNFINISHED = "unfinished_"  # prefix of a part that is being written
MAX_PENDING_WRITES = 2
NUM_READERS = 2  # threads that read and cast the parameters of one part

Content = TypeVar("Content")
ProgressCallback = Callable[[int, int], None]  # (bytes of the part just written, bytes of all missing parts)


@dataclass(frozen=True)
class Part:
    """Part of a folder: the file or folder `name` with the parameters `params`, of `bytes` in total."""

    name: str
    params: tuple[str, ...]
    bytes: int


def fingerprint(files: Iterable[Path], *options: object) -> str:
    """Return a hash of the names, sizes and modification times of the source files, and of a conversion's options."""
    stats = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return hashlib.sha256(json.dumps([stats, [str(option) for option in options]]).encode()).hexdigest()


@dataclass(frozen=True)
class PartsWriter(Generic[Content]):
    """Writes a folder of `parts`, with at most three parts in memory.

    `load`: returns the content of a part; `save`: writes the content to a path; `finish`: adds the remaining files.
    """

    parts: Sequence[Part]
    load: Callable[[Part], Content]
    save: Callable[[Path, Content], None]
    finish: Callable[[Path], None]

    def write(self, destination: Path, record: dict[str, str], report_progress: ProgressCallback) -> None:
        """Write the missing parts, call `finish`, and rename the folder; do nothing if `destination` is complete.

        `record`: content of conversion.json; an existing folder with another `source` in its record is refused.
        """
        folder = incomplete_folder(destination)
        for written in (destination, folder):
            if written.exists() and read_json(written / CONVERSION_RECORD).get("source") != record["source"]:
                raise UserError(f"{written} is of another conversion, or of none: choose another destination")
        if destination.exists():
            return

        complete = [part for part in self.parts if (folder / part.name).exists()]
        missing = [part for part in self.parts if part not in complete]
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():  # remove unfinished parts and temporary files of libraries
            if path.name not in (CONVERSION_RECORD, *(part.name for part in complete)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        write_json(folder / CONVERSION_RECORD, record)

        total = sum(part.bytes for part in missing)
        for part in self._write(folder, missing):
            report_progress(part.bytes, total)
        self.finish(folder)
        for file in folder.iterdir():
            sync_to_disk(file)
        folder.rename(destination)

    def _write(self, folder: Path, parts: Sequence[Part]) -> Iterator[Part]:
        """Load, save and sync the parts in parallel, and yield each part when it is on disk."""

        def write(part: Part, content: Content) -> Part:
            unfinished = folder / f"{UNFINISHED}{part.name}"
            self.save(unfinished, content)
            for path in (*unfinished.rglob("*"), unfinished):
                sync_to_disk(path)
            unfinished.rename(folder / part.name)
            return part

        with ThreadPoolExecutor(MAX_PENDING_WRITES) as executor:
            pending: deque[Future[Part]] = deque()
            for part in parts:
                content = self.load(part)
                if len(pending) == MAX_PENDING_WRITES:
                    yield pending.popleft().result()
                pending.append(executor.submit(write, part, content))
                del content
            for future in pending:
                yield future.result()


def map_in_threads(load: Callable[[str], Content], names: Sequence[str]) -> Iterator[Content]:
    """Yield `load(name)` for each name, in order, with `NUM_READERS` threads."""
    with ThreadPoolExecutor(NUM_READERS) as executor:
        yield from executor.map(load, names)
