"""What was read of a file is not read again: its beginning may be overwritten meanwhile."""

import os
from pathlib import Path

from grpo_mp.monitor.appended import Appended, AppendedLines, ChangedFiles


def overwrite(file: Path, content: bytes) -> None:
    """Put bytes at the start of a file without a change of its size."""
    with file.open("r+b") as stream:
        stream.write(content)


def append(file: Path, content: bytes) -> None:
    with file.open("ab") as stream:
        stream.write(content)


def test_lines_come_once_and_what_is_unfinished_comes_again(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    lines = AppendedLines(file)
    assert lines.read() == Appended(anew=True)  # it may come
    file.write_bytes(b"one\n" + b"two" * 30 + b"\nthr")
    assert lines.read() == Appended((b"one", b"two" * 30), b"thr", anew=True)
    assert lines.read() == Appended((), b"thr")
    overwrite(file, b"---\n---")
    append(file, b"ee\n\nfour\n")
    assert lines.read() == Appended((b"three", b"", b"four"), b"")
    assert lines.read() == Appended()


def test_another_file_of_the_name_is_read_from_its_start(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"one\ntwo\n")
    lines = AppendedLines(file)
    lines.read()
    (tmp_path / "new").write_bytes(b"ONE\nTWO\nTHREE\n")
    os.replace(tmp_path / "new", file)
    assert lines.read() == Appended((b"ONE", b"TWO", b"THREE"), b"", anew=True)
    file.write_bytes(b"cut\n")
    assert lines.read() == Appended((b"cut",), b"", anew=True)
    file.write_bytes(b"CUT\nmore\n")  # with the number of the one before
    assert lines.read() == Appended((b"CUT", b"more"), b"", anew=True)
    file.unlink()
    assert lines.read() == Appended(anew=True)


def test_a_file_that_cannot_be_read_for_now_has_nothing_new(tmp_path: Path) -> None:
    (tmp_path / "lines").mkdir()
    assert AppendedLines(tmp_path / "lines").read() == Appended()


def test_of_a_long_file_only_the_end_is_read_at_first(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"a long first line\nsecond\nthird\n")
    assert AppendedLines(file, tail_bytes=16).read() == Appended((b"second", b"third"), b"", anew=True)
    assert AppendedLines(file, tail_bytes=99).read().lines[0] == b"a long first line"


def test_files_are_parsed_when_they_change_and_forgotten_when_nobody_asks(tmp_path: Path) -> None:
    files, parsed = ChangedFiles(), list[str]()

    def parse(file: Path) -> str:
        parsed.append(file.name)
        return file.read_text()

    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    assert [files.read(tmp_path / name, parse) for name in "abab"] == ["a", "b", "a", "b"]
    assert parsed == ["a", "b"]
    (tmp_path / "a").write_text("changed")
    assert files.read(tmp_path / "a", parse) == "changed"
    files.forget_others()
    files.read(tmp_path / "a", parse)
    files.forget_others()
    files.read(tmp_path / "b", parse)
    assert parsed == ["a", "b", "a", "b"]
