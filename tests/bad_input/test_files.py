"""Files of the planner, of runs, conversions and dumps; parts by path; commands and their environment."""

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mp.algorithms.registries import POLICY_LOSSES
from grpo_mp.checkpoint.run_state import (
    check_run_folder,
)
from grpo_mp.checkpoint.torch_dist import read_metadata
from grpo_mp.cli.main import main
from grpo_mp.config import check_settings, dump_settings
from grpo_mp.distributed.ports import JOB_PORTS, claim_ports
from grpo_mp.monitor.run_folder import read_metrics
from grpo_mp.monitor.timeline import Timeline, close_open_spans, read_trace, trace_path
from grpo_mp.planner.clusters import PROFILES, read_cluster
from grpo_mp.rollout.dump import read_facts, read_groups, write_groups
from grpo_mp.rollout.journal import cut_torn_tail, load, read_records
from grpo_mp.utils.errors import UserError
from tests.bad_input.doors import NO_TEXT, NOT_FILES, Content, answers, as_nobody, noise, put, refused, tree
from tests.minimal_settings import MINIMAL_SETTINGS
from tests.rollout.test_journal import FINISHED, PAUSED, PROMPT, written

ROOT = Path(__file__).parents[2]
H100 = yaml.safe_load(PROFILES.read_text())["h100-80"]


def as_yaml(value: Any) -> bytes:
    return yaml.safe_dump(value).encode()


def bad(door: Callable[[Path], Any], file: Path, content: Content, name: str = "") -> str:
    """What the door says of a file with this content, or of what is in its place; nothing is written."""
    file.parent.chmod(0o755)
    put(file, content)
    before = tree(file.parent)
    with as_nobody(name):
        sentence = refused(lambda: door(file))
    assert tree(file.parent) == before
    return sentence


# -- planner -------------------------------------------------------------------------------------------------

NUMBERS: tuple[Any, ...] = (0, -1, True, "many", [1], {"a": 1}, 1e300, 10**30)
CLUSTERS: dict[str, Content] = {
    **NOT_FILES,
    **NO_TEXT,
    "empty": b"",
    "a list": b"[]",
    "a bomb": b"a: &a [x, x]\nb: &b [*a, *a]\n" * 3,
    "deep": b"[" * 5000,
    "NaN": as_yaml(H100 | {"gpu_memory_gib": float("nan")}),
    "infinite": as_yaml(H100 | {"gpu_memory_gib": float("inf")}),
    "half a GPU": as_yaml(H100 | {"gpus_per_node": 7.5}),
    "an unknown number": as_yaml(H100 | {"speed": 1}),
    "a list as name": as_yaml(H100) + b"? [a]\n: 1\n",
    "no shares": as_yaml(H100 | {"achievable": None}),
    "shares as a number": as_yaml(H100 | {"achievable": 0.5}),
    "a share above 1": as_yaml(H100 | {"achievable": H100["achievable"] | {"matmul": 35}}),
    "a share below 0": as_yaml(H100 | {"achievable": H100["achievable"] | {"matmul": -0.35}}),
    **{f"no {key}": as_yaml({name: H100[name] for name in H100 if name != key}) for key in H100 if key != "fp8_tflops"},
    **{f"memory={number!r}": as_yaml(H100 | {"gpu_memory_gib": number}) for number in NUMBERS},
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_clusters(name: str, tmp_path: Path) -> None:
    bad(lambda file: read_cluster(str(file)), tmp_path / "cluster.yaml", CLUSTERS[name], name)


@pytest.mark.parametrize("name", ["", "h100", "a" * 5000, "a\0b.yaml", "/", "/dev/zero", "cluster.json"], ids=ascii)
def test_names_of_clusters(name: str) -> None:
    refused(lambda: read_cluster(name))


def test_noise_in_planner_files(tmp_path: Path) -> None:
    for content in noise(as_yaml(H100), count=100, seed=6):
        cluster = answers(lambda content=content: read_cluster(str(put(tmp_path / "c.yaml", content))))
        assert cluster is None or cluster.gpu_bytes > 0


# -- runs ----------------------------------------------------------------------------------------------------


RUN_FOLDERS: dict[str, Callable[[Path], Any]] = {
    "a file": lambda run: run.write_bytes(b""),
    "below a file": lambda run: run.parent.write_bytes(b""),
    "a pipe": lambda run: os.mkfifo(run),
    "settings that are a folder": lambda run: (run / "settings.yaml").mkdir(parents=True),
    "settings of another run": lambda run: (run.mkdir(), (run / "settings.yaml").write_bytes(b"run: {steps: 3}")),
    "settings that are no YAML": lambda run: (run.mkdir(), (run / "settings.yaml").write_bytes(b"{")),
    "settings that are a list": lambda run: (run.mkdir(), (run / "settings.yaml").write_bytes(b"[1]")),
    "settings that are binary": lambda run: (run.mkdir(), (run / "settings.yaml").write_bytes(b"\xff\xfe")),
}


@pytest.mark.parametrize("name", RUN_FOLDERS)
def test_run_folders(name: str, tmp_path: Path) -> None:
    run = tmp_path / "a" / "run" if name == "below a file" else tmp_path / "run"
    RUN_FOLDERS[name](run)
    if run.is_dir():
        (run / "metrics.jsonl").write_text("")
    before = tree(tmp_path)
    resolved = dump_settings(check_settings(MINIMAL_SETTINGS, "here"))
    refused(lambda: check_run_folder(run, resolved, resume=True))
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", [*NOT_FILES, *NO_TEXT])
def test_metadata_of_converted_folders(name: str, tmp_path: Path) -> None:
    if name != "pipe":  # is_torch_dist has found a file
        bad(lambda file: read_metadata(file.parent), tmp_path / ".metadata", (NOT_FILES | NO_TEXT)[name], name)


def test_noise_in_a_journal(tmp_path: Path) -> None:
    """What is damaged is left out; what is read is what was written."""
    file = written(tmp_path, PAUSED, FINISHED)
    content = file.read_bytes()
    whole = [load(record, PROMPT) for record in read_records(file)]
    for changed in noise(content, count=150, seed=8):
        put(file, changed)
        loaded = answers(lambda: [load(record, PROMPT) for record in read_records(file)])
        assert loaded is not None
        assert all(one in whole for one in loaded)
        cut_torn_tail(file)
        assert len(read_records(file)) == len(loaded)


def test_noise_in_a_dump(tmp_path: Path) -> None:
    file = tmp_path / "rank_0.parquet"
    write_groups(file, [FINISHED], {40}, "facts")
    content = file.read_bytes()
    whole = read_groups(file)
    for changed in noise(content, count=150, seed=9):
        put(file, changed)
        facts, groups = answers(lambda: read_facts(file)), answers(lambda: read_groups(file))
        assert groups is None or groups == whole or facts != b"facts"


@pytest.mark.parametrize("name", [*NOT_FILES, *NO_TEXT, "empty"])
def test_dumps(name: str, tmp_path: Path) -> None:
    content = (NOT_FILES | NO_TEXT | {"empty": b""})[name]
    for door in (read_facts, read_groups):
        bad(door, tmp_path / "rank_0.parquet", content, name)
        (tmp_path / "rank_0.parquet").rmdir() if name == "folder" else None


# -- parts by path, environment, commands --------------------------------------------------------------------

PARTS: dict[str, Content] = {
    **NOT_FILES,
    "binary": bytes(range(256)),
    "no Python": b"def loss(:",
    "a null byte": b"x = 1\0",
    "another encoding": b"# coding: magic\n",
    "Latin-1": "x = 'ä'".encode("latin-1"),
    "nothing of that name": b"x = 1",
    "no function": b"loss = 3",
    "a function of nothing": b"def loss(): pass",
    "one that raises": b"raise ValueError('no')",
    "one that fails to import": b"import nothing_at_all",
    "one that exits": b"import sys; sys.exit(0)",
    "one that leaves": b"import os; os._exit(0)",
    "one that recurses": b"def f(): f()\nf()",
    "deep": b"x = " + b"(" * 5000 + b")" * 5000,
    "one that loops": b"while True: pass",
    "one that takes all errors and loops": b"while True:\n    try:\n        pass\n    except Exception:\n        pass",
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_by_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_mp.utils.user_code.IMPORT_LIMIT_S", 0.2)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    bad(lambda file: POLICY_LOSSES.resolve(f"{file}:loss", "here"), tmp_path / "part.py", PARTS[name], name)


NAMES = [
    "",
    ":",
    "a:",
    ":a",
    "no_such_module:loss",
    "os:no_such",
    "os.path",
    "a b:c",
    "\0:loss",
    "x" * 5000 + ".py:loss",
    "/dev/zero.py:loss",
    "..:loss",
    ".py:loss",
    "\udcff:loss",
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name[:30]))
def test_names_of_parts(name: str) -> None:
    refused(lambda: POLICY_LOSSES.resolve(name, "here"))


PORTS = [
    "",
    "-",
    "1",
    "a-b",
    "20001-",
    "-20001",
    "20100-20001",
    "0-0",
    "1-70000",
    "20001-20199-1",
    "²-³",
    "20001-9" + "9" * 5000,
]


@pytest.mark.parametrize("value", PORTS, ids=lambda value: ascii(value[:20]))
def test_ports_of_a_job(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_PORTS, value)
    assert JOB_PORTS in refused(claim_ports)


PLAIN = """\
fly
train
plan
plan none.yaml
plan /
plan /dev/zero
PLAN --nodes 0
PLAN --nodes -1
PLAN --nodes 1.5
PLAN --nodes many
PLAN --nodes 1000000000
PLAN --gpus-per-node 0
PLAN --cluster none
PLAN --response-tokens 0
PLAN --model-config none
PLAN --model-config /dev/zero
PLAN --acceptance-length 0
PLAN --acceptance-length inf
launch TINY --nodes 2 --spares -1 --dry-run
launch TINY --nodes 2 --spares 99999999999999999999999 --dry-run
launch TINY --nodes 99999999999999999999999 --dry-run
PLAN run.steps=0
PLAN --jsno x
train TINY --ranks 0
train TINY --ranks 720720000
train TINY --ranks x
evaluate none.yaml --ranks -1
sample none.yaml
sample TINY --samples 0
sample TINY --model . --checkpoint .
convert
convert info
convert info none
convert info /
convert info /dev/zero
convert check / /
convert check / / --tolerance nan
convert to-hf / /
convert to-megatron none x
convert to-megatron . .
convert to-hf none x --part-bytes 0
convert to-hf none x --part-bytes -1
launch none.yaml
launch TINY --nodes 0
launch TINY --nodes x
"""
ODD: tuple[tuple[str, ...], ...] = (
    (),
    ("",),
    ("plan", "\udcff"),
    ("plan", "configs/moe_671b.yaml", "--nodes", "\xb2"),
    ("plan", "configs/moe_671b.yaml", "--nodes", "9" * 5000),
    ("convert", "info", "a\x00b"),
    ("convert", "info", "x" * 300),
)
SHORT = {"PLAN": "plan configs/moe_671b.yaml", "TINY": "configs/tiny_moe.yaml"}
COMMANDS = [tuple(re.sub("PLAN|TINY", lambda name: SHORT[name[0]], line).split()) for line in PLAIN.splitlines()]


@pytest.mark.parametrize("arguments", [*COMMANDS, *ODD], ids=lambda arguments: ascii(" ".join(arguments)[:60]))
def test_commands(
    arguments: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    monkeypatch.chdir(tmp_path)

    def command() -> None:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        out, err = capfd.readouterr()
        assert (ended.value.code, err.count("\n")) == (2, 1), (ended.value.code, out, err)
        raise UserError(err.strip())

    assert refused(command).startswith("error: ")
    assert sorted(os.listdir(tmp_path)) == ["configs", "launch"]


NO_TEXT_BYTES = [content for content in NO_TEXT.values() if isinstance(content, bytes)]


def test_noise_in_what_a_run_reads_of_itself(tmp_path: Path) -> None:
    """Lines of metrics and events of a trace that are damaged are left out; nothing raises."""
    lines = "".join(json.dumps({"step": step, "reward/mean": 0.5, "train/lr": None}) + "\n" for step in range(5))
    for content in (
        *noise(lines.encode(), count=150, seed=8),
        *NO_TEXT_BYTES,
    ):
        for line in answers(lambda content=content: read_metrics(put(tmp_path / "metrics.jsonl", content))):
            assert type(line["step"]) is int
    timeline = Timeline(tmp_path, 0)
    for name in ("GENERATE", "TRAIN"):
        with timeline.span(name):
            pass
    timeline.close()
    file = trace_path(tmp_path, 0)
    events = file.read_bytes()
    for content in (*noise(events, count=150, seed=9), *NO_TEXT_BYTES):
        put(file, content)
        answers(lambda: close_open_spans(read_trace(file)))
