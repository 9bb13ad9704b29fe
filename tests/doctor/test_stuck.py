"""Who waits for whom: on dumps written out, and on real ranks that hang, asked by the command."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_mp.cli.main import main
from grpo_mp.monitor import rank_processes as processes
from grpo_mp.monitor.rank_dump import (
    Collective,
    Group,
    PhaseTime,
    RankDump,
    ThreadStack,
    read_collective,
)
from grpo_mp.monitor.stuck import diagnose
from grpo_mp.utils.findings import Level
from tests.doctor.hanging_rank import WORLD_SIZE

GROUPS = {"1": Group("tensor", (0, 1)), "2": Group("expert", (1, 2)), "3": Group("data", (0, 2))}
FRAMES = ("/usr/lib/python/threading.py:1 run", "/home/me/grpo_mp/trainer/update.py:7 train_step", "/torch/x.py:3 wait")


def call(group: str, sequence: int, is_pending: bool = True, operation: str = "gloo:all_reduce") -> Collective:
    return Collective(group, sequence, operation, ((4,),), False, is_pending, age_s=60.0)


def dump(rank: int, *calls: Collective, records_all: bool = True) -> RankDump:
    groups = {key: group for key, group in GROUPS.items() if rank in group.ranks}
    stacks = (ThreadStack("MainThread", FRAMES),)
    return RankDump(rank, "node1", 100 + rank, 1e9, (PhaseTime("TRAIN", 61.0),), stacks, groups, calls, records_all)


def dumps(*those: RankDump) -> dict[int, RankDump]:
    return {dump.rank: dump for dump in those}


def test_the_rank_at_the_end_of_a_chain_holds_up_the_others() -> None:
    found = diagnose(dumps(dump(0, call("1", 3)), dump(1, call("1", 2, False), call("2", 1)), dump(2)), {})
    (finding,) = [finding for finding in found if finding.level is Level.ERROR]
    assert (
        finding.sentence
        == "rank 2 holds up rank 1: rank 2 is in TRAIN for 61 s, at grpo_mp/trainer/update.py:7 train_step"
    )
    assert finding.evidence[0] == "rank 1 waits for it since 60 s in all_reduce #1 of group expert (ranks 1, 2)"
    assert "  /torch/x.py:3 wait" in finding.evidence


def test_a_slow_collective_of_all_its_ranks_decides_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = dumps(dump(0, call("1", 3)), dump(1, call("1", 3)))
    monkeypatch.setattr(processes, "ask_ranks", lambda folder, limit_s: (both, {}, []))
    assert main(["doctor", "stuck", str(tmp_path), "--over-s", "59"]) == 1
    assert main(["doctor", "stuck", str(tmp_path), "--over-s", "61"]) == 0


def test_a_rank_that_has_called_since_is_not_waited_for() -> None:
    found = diagnose(dumps(dump(0, call("1", 3)), dump(1, call("1", 3))), {})
    assert [finding.level for finding in found] == [Level.ERROR, Level.OK]
    assert found[0].sentence.startswith("all ranks are in all_reduce #3 of group tensor (ranks 0, 1), since 60 s")


def test_different_collectives_in_one_place() -> None:
    found = diagnose(dumps(dump(0, call("1", 1)), dump(1, call("1", 1, operation="gloo:broadcast"))), {})
    assert found[0].sentence == "ranks of group tensor call different collectives as their #1"
    assert found[0].evidence == ["rank 0: all_reduce of [[4]]", "rank 1: broadcast of [[4]]"]


def test_a_rank_that_waits_for_a_dead_one_holds_up_nobody() -> None:
    chain = dumps(dump(0, call("1", 3)), dump(1, call("1", 2, False), call("2", 1)))
    found = diagnose(chain, {2: "its process has ended"})
    (finding,) = [finding for finding in found if finding.level is Level.ERROR]
    assert finding.sentence == "rank 2: its process has ended"
    assert finding.evidence == ["rank 1 waits since 60 s in all_reduce #1 of group expert (ranks 1, 2)"]


def test_a_circle_is_told_from_what_leads_into_it() -> None:
    groups = GROUPS | {"4": Group("pipeline", (2, 3))}
    circle = [dump(0, call("1", 1)), dump(1, call("2", 1)), dump(2, call("3", 1)), dump(3, call("4", 1))]
    found = diagnose({rank: replace(each, groups=groups) for rank, each in enumerate(circle)}, {})
    assert [finding.sentence for finding in found if finding.level is Level.ERROR] == [
        "ranks 0, 1, 2 wait for each other in different collectives"
    ]


def transfer(name: str, is_pending: bool = True) -> Collective:
    """In group expert, of ranks 1 and 2: places 0 and 1."""
    return replace(call("2", 1, is_pending, f"nccl:{name}"), is_p2p=True)


@pytest.mark.parametrize(("name", "text"), [("recv 0<-1", "recv from rank 2"), ("send 0->1", "send to rank 2")])
def test_a_pipeline_waits_for_the_rank_that_does_not_send_or_receive(name: str, text: str) -> None:
    done = transfer("send 1->0", is_pending=False)
    (finding, *_) = diagnose(dumps(dump(1, transfer(name)), dump(2, done)), {})
    assert finding.sentence.startswith("rank 2 holds up rank 1: ")
    assert finding.evidence[0] == f"rank 1 waits for it since 60 s in {text} of group expert"
    (finding, *_) = diagnose(dumps(dump(1, transfer(name))), {2: "its process has ended"})
    assert finding.evidence == [f"rank 1 waits since 60 s in {text} of group expert"]


def test_a_silent_rank_is_named_with_who_may_wait_for_it() -> None:
    found = diagnose(dumps(dump(0, call("1", 5))), {1: "its process has ended", 2: "its process has ended"})
    assert found[0].sentence == "ranks 1, 2: its process has ended"
    assert found[0].evidence == ["rank 0 waits since 60 s in all_reduce #5 of group tensor (ranks 0, 1)"]


@pytest.mark.parametrize(
    ("retired", "state", "is_pending"),
    [(False, "scheduled", True), (True, "scheduled", False), (False, "completed", False)],
)
def test_the_recorder_of_either_backend_is_read(retired: bool, state: str, is_pending: bool) -> None:
    entry = {
        "process_group": ["7", "expert"], "collective_seq_id": 5, "p2p_seq_id": 2, "is_p2p": False, "retired": retired,
        "profiling_name": "nccl:all_to_all", "input_sizes": [[2, 3]], "state": state, "time_created_ns": 2_000_000_000,
    }  # fmt: skip
    assert read_collective(entry, 12.0) == Collective("7", 5, "nccl:all_to_all", ((2, 3),), False, is_pending, 10.0)


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
    hanging_ranks: list[subprocess.Popen[bytes]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked twice, and again after one has died."""
    for _ in range(2):
        assert main(["doctor", "stuck", str(tmp_path), "--over-s", "0"]) == 1
        said = capsys.readouterr().out
        assert "error: rank 2 holds up rank 1: rank 2 is in TRAIN for" in said
        assert "rank 1 waits for it since" in said
        assert "all_reduce #2 of group right (ranks 1, 2)" in said
        assert "sleeps_before_the_collective" in said
        assert "rank 1 holds up" not in said
    main(["doctor", "stuck", str(tmp_path), "--over-s", "1000", "--full"])
    said = capsys.readouterr().out
    assert "error:" not in said
    for rank in range(WORLD_SIZE):
        _, _, stacks = said.partition(f"rank {rank} on ")
        assert "hanging_rank.py" in stacks.partition("\nrank ")[0]
    hanging_ranks[2].kill()
    hanging_ranks[2].wait()
    assert main(["doctor", "stuck", str(tmp_path), "--over-s", "0"]) == 1
    said = capsys.readouterr().out
    assert "error: rank 2: its process has ended" in said
    assert "rank 2 holds up" not in said  # rank 1's collective breaks off: it may be on its way out, and hold up rank 0


@pytest.mark.parametrize("folder", ["missing", "."])
def test_a_folder_without_ranks(folder: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "stuck", str(tmp_path / folder)])
    assert ended.value.code == 2
