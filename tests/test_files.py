"""Files that are whole or absent, also where several write the same one at a time."""

from pathlib import Path

import pytest

from grpo_mp.utils.files import incomplete, remove_incomplete


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Of two nodes, say, where their processes have the same number: the last to end has the name."""
    file = tmp_path / "notes.txt"
    with incomplete(file) as slow:
        slow.write_text("slow, ")
        with incomplete(file) as fast:
            fast.write_text("fast")
        assert file.read_text() == "fast"
        with pytest.raises(FileNotFoundError), incomplete(file):
            (tmp_path / "none").read_text()
        with slow.open("a") as stream:
            stream.write("whole")
    assert file.read_text() == "slow, whole"
    assert [*tmp_path.iterdir()] == [file]


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    kept = [tmp_path / "notes.txt", tmp_path / "below" / "checkpoint.incomplete"]
    for file in kept:
        file.write_text("whole")
    writer = incomplete(tmp_path / "below" / "notes.txt")
    writer.__enter__().write_text("half")
    remove_incomplete(tmp_path)
    assert sorted(file for file in tmp_path.rglob("*") if file.is_file()) == sorted(kept)
