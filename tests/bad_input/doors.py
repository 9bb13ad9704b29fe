"""Bad input at a door: one sentence, nothing written, and no wait."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_mp.utils.errors import UserError

LIMIT_S = 60.0
NOBODY = 65534
UNREADABLE = "unreadable"
LONGEST_SENTENCE = 1500
Content = bytes | Callable[[Path], None]  # of a file, or what makes it


class HangError(BaseException):
    """The door did not answer."""


@contextmanager
def time_limit(limit_s: float = LIMIT_S) -> Iterator[None]:
    """Raise HangError in the body once the time is over."""

    def end(*_: Any) -> None:
        raise HangError(f"no answer within {limit_s} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def refused(door: Callable[[], Any]) -> str:
    """The sentence with which the door refuses. Fails where it lets in, takes too long, or raises anything else."""
    try:
        with time_limit():
            result = door()
    except UserError as error:
        sentence = str(error)
        assert sentence.strip()
        assert "\n" not in sentence, sentence
        assert len(sentence) < LONGEST_SENTENCE, sentence
        return sentence
    raise AssertionError(f"let in: {result!r:.500}")


def answers(door: Callable[[], Any]) -> Any:
    """What the door makes of noise: None where it is refused. Fails where it is late, or raises anything else."""
    try:
        with time_limit():
            return door()
    except UserError:
        return None


@contextmanager
def as_nobody(name: str) -> Iterator[None]:
    """Let permissions count in the body of the case `unreadable`: root may read everything."""
    is_root = name == UNREADABLE and os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def tree(folder: Path) -> list[tuple[str, int]]:
    """Every file of a folder with its size, links not followed."""
    return sorted((str(path.relative_to(folder)), path.lstat().st_size) for path in folder.rglob("*"))


def put(file: Path, content: Content) -> Path:
    """Make a file, or something in its place."""
    file.unlink(missing_ok=True)
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        content(file)
    return file


# What can be in a file's place, whatever its format.
NOT_FILES: dict[str, Content] = {
    "nothing": lambda file: None,
    "folder": lambda file: file.mkdir(),
    "pipe": lambda file: os.mkfifo(file),
    "link to itself": lambda file: file.symlink_to(file.name),
    "link to nothing": lambda file: file.symlink_to("gone"),
    "link to endless zeros": lambda file: file.symlink_to("/dev/zero"),
    "link to an empty device": lambda file: file.symlink_to("/dev/null"),
    UNREADABLE: lambda file: (file.write_bytes(b"{}"), file.chmod(0))[0] and None,
}
# Content that no text format reads.
NO_TEXT: dict[str, Content] = {
    "binary": bytes(range(256)) * 4,
    "zeros": bytes(4096),
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "half a character": b'{"a": "\xc3"}',
    "a zero character": b'{"a": "x\0y"}',
}


def noise(content: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Yield copies with a flipped bit, cut, with bytes put in, or with a piece doubled."""
    draw = random.Random(seed)
    for _ in range(count):
        place, changed = draw.randrange(len(content)), bytearray(content)
        kind = draw.randrange(4)
        if kind == 0:
            changed[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[place:]
        elif kind == 2:
            changed[place:place] = draw.choice(
                [b"\0", b"\xff", b"[" * 200, b'"', b"\n\n", b"{", b"1e999", b"-", b"NaN"]
            )
        else:
            changed[place:place] = changed[max(0, place - draw.randrange(1, 200)) : place]
        if bytes(changed) != content:
            yield bytes(changed)
