"""Who waits for whom: on dumps written out, and on real ranks that hang, asked by the command."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_mp.cli.main import main
from grpo_mp.monitor import stuck
from grpo_mp.monitor.rank_dump import Collective, RankDump, read_call
from grpo_mp.monitor.stuck import diagnose
from grpo_mp.utils.findings import Level
from tests.doctor.hanging_rank import WORLD_SIZE

GROUPS = {"tensor": (0, 1), "expert": (1, 2), "data": (0, 2), "pipeline": (2, 3)}
FRAMES = ("/usr/lib/python/threading.py:1 run", "/home/me/grpo_mp/trainer/update.py:7 train_step", "/torch/x.py:3 wait")


def call(group: str, sequence: int, is_pending: bool = True, operation: str = "all_reduce") -> Collective:
    return Collective(group, group, GROUPS[group], sequence, operation, False, is_pending, age_s=60.0)


def dump(rank: int, *calls: Collective) -> RankDump:
    return RankDump(rank, "node1", 100 + rank, 1e9, "TRAIN for 61 s", FRAMES, calls)


def dumps(*those: RankDump) -> dict[int, RankDump]:
    return {dump.rank: dump for dump in those}


def test_the_rank_at_the_end_of_a_chain_holds_up_the_others() -> None:
    chain = dumps(dump(0, call("tensor", 3)), dump(1, call("tensor", 2, False), call("expert", 1)), dump(2))
    finding, places = diagnose(chain, {})
    assert finding.sentence == (
        "rank 2 holds up rank 1: it is in TRAIN for 61 s, at grpo_mp/trainer/update.py:7 train_step"
    )
    line = "rank 1 waits since 60 s in all_reduce #1 of group expert (ranks 1, 2), without rank 2"
    assert (finding.level, finding.evidence) == (Level.ERROR, [line])
    assert places.evidence[0] == "ranks 0, 1, 2 in TRAIN for 61 s, at grpo_mp/trainer/update.py:7 train_step:"
    assert "  /torch/x.py:3 wait" in places.evidence


def test_short_waits_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    both = dumps(dump(0, call("tensor", 3)), dump(1, call("tensor", 3)))
    monkeypatch.setattr(stuck, "OVER_S", 61.0)
    (places,) = diagnose(both, {}, ["engine of rank 0: /sglang/x.py:1 wait"])
    assert places.level is Level.OK
    assert places.sentence.startswith("no rank waits for another one")
    assert places.evidence[-1] == "engine of rank 0: /sglang/x.py:1 wait"


def test_ranks_that_have_all_called_wait_for_each_other() -> None:
    different = dumps(dump(0, call("tensor", 1)), dump(1, call("tensor", 1, operation="broadcast")))
    found = diagnose(different, {})
    assert [finding.level for finding in found] == [Level.ERROR, Level.OK]
    assert found[0].sentence == "ranks 0, 1 wait for each other"
    assert found[0].evidence == [
        "rank 0 waits since 60 s in all_reduce #1 of group tensor (ranks 0, 1)",
        "rank 1 waits since 60 s in broadcast #1 of group tensor (ranks 0, 1)",
    ]


def test_a_rank_that_waits_for_a_dead_one_holds_up_nobody() -> None:
    chain = dumps(dump(0, call("tensor", 3)), dump(1, call("tensor", 2, False), call("expert", 1)))
    finding, places = diagnose(chain, {2: "its process has ended"})
    assert (finding.sentence, places.level) == ("rank 2: its process has ended", Level.OK)
    assert [line.partition(" (")[0] for line in finding.evidence] == [
        "rank 1 waits since 60 s in all_reduce #1 of group expert"
    ]


def test_a_circle_of_ranks() -> None:
    circle = [dump(rank, call(group, 1)) for rank, group in enumerate(("tensor", "expert", "data"))]
    found = diagnose(dumps(*circle), {})
    assert [finding.sentence for finding in found if finding.level is Level.ERROR] == [
        "ranks 0, 1, 2 wait for each other"
    ]


def transfer(operation: str, ranks: tuple[int, int], is_pending: bool = True) -> Collective:
    return replace(call("expert", 1, is_pending, operation), is_p2p=True, ranks=ranks)


@pytest.mark.parametrize("operation", ["recv", "send"])
def test_a_pipeline_waits_for_the_rank_that_does_not_send_or_receive(operation: str) -> None:
    done = transfer("send", (2, 1), is_pending=False)
    (finding, *_) = diagnose(dumps(dump(1, transfer(operation, (1, 2))), dump(2, done)), {})
    assert finding.sentence.startswith("rank 2 holds up rank 1: ")
    assert f"in {operation} #1 of group expert" in finding.evidence[0]


@pytest.mark.parametrize(
    ("retired", "state", "is_pending"),
    [(False, "scheduled", True), (True, "scheduled", False), (False, "completed", False)],
)
def test_the_recorder_of_either_backend_is_read(retired: bool, state: str, is_pending: bool) -> None:
    entry = {
        "process_group": ["7", "expert"], "collective_seq_id": 5, "p2p_seq_id": 2, "is_p2p": False, "retired": retired,
        "profiling_name": "nccl:all_to_all", "input_sizes": [[2, 3]], "state": state, "time_created_ns": 2_000_000_000,
    }  # fmt: skip
    groups = {"7": (4, 6)}
    expected = Collective("7", "expert", (4, 6), 5, "all_to_all", False, is_pending, 10.0)
    assert read_call(entry, groups, 12.0) == expected
    transfer = entry | {"is_p2p": True, "profiling_name": "nccl:recv 1<-0"}
    received = replace(expected, ranks=(6, 4), sequence=2, operation="recv", is_p2p=True)
    assert read_call(transfer, groups, 12.0) == received
    assert read_call(transfer | {"profiling_name": "nccl:coalesced"}, groups, 12.0) is None


@pytest.fixture
def hanging_ranks(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Three ranks: 0 waits for 1 in one group, 1 for 2 in another, 2 sleeps."""
    command = [sys.executable, "-m", "tests.doctor.hanging_rank", str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE) for rank in range(WORLD_SIZE)]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"hangs\n"
    yield ranks
    for rank in ranks:
        rank.kill()
        rank.communicate()


def test_real_ranks_that_hang(
    hanging_ranks: list[subprocess.Popen[bytes]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asked twice, and again after one has died."""
    monkeypatch.setattr(stuck, "OVER_S", 0.0)
    for _ in range(2):
        assert main(["doctor", "stuck", str(tmp_path)]) == 1
        said = capsys.readouterr().out
        assert "error: rank 2 holds up rank 1: it is in TRAIN for 9 s" in said
        assert re.search(
            r"rank 1 waits since \d+ s in all_reduce #2 of group right \(ranks 1, 2\), without rank 2", said
        )
        assert "sleeps_before_the_collective" in said
        assert "rank 1 holds up" not in said
        assert said.count("hanging_rank.py") >= WORLD_SIZE
    hanging_ranks[2].kill()
    hanging_ranks[2].wait()
    assert main(["doctor", "stuck", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "error: rank 2: its process has ended" in said
    assert "rank 2 holds up" not in said  # rank 1's collective breaks off: it may be on its way out, and hold up rank 0


@pytest.mark.parametrize("folder", ["missing", "."])
def test_a_folder_without_ranks(folder: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "stuck", str(tmp_path / folder)])
    assert ended.value.code == 2
