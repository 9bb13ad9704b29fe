"""A job that joins a run folder while the former one still saves there: what it resumes from is what that one left."""

import subprocess
import sys
from pathlib import Path

from grpo_mp.checkpoint.run_state import claim_run_folder
from grpo_mp.config.load import check_settings, dump_settings
from tests.minimal_settings import MINIMAL_SETTINGS
from tests.trainer.test_resume import save

FORMER = """
import sys
from pathlib import Path
from grpo_mp.checkpoint.run_lock import run_lock
from grpo_mp.checkpoint.run_state import prune_checkpoints
from tests.trainer.test_resume import save

run = Path(sys.argv[1])
with run_lock(run):
    print("holds", flush=True)
    sys.stdin.readline()
    save(run, 4)
    prune_checkpoints(run, 1)
"""
NEXT = """
import logging, sys, yaml
from functools import partial
from pathlib import Path
from grpo_mp.checkpoint.run_state import resumable_checkpoints
from grpo_mp.config.load import check_settings, dump_settings
from grpo_mp.distributed.process_groups import single_rank_environment
from grpo_mp.trainer.job import join_run

logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")  # for the lock
settings = check_settings(yaml.safe_load(sys.argv[1]), "test")
with single_rank_environment():
    find = partial(resumable_checkpoints, settings.run.folder, "")
    with join_run(settings.run, 60.0, dump_settings(settings), find) as (job, resumed):
        print(resumed.state.step, resumed.damages, flush=True)
"""


def start(script: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_the_checkpoints_are_those_of_the_end_of_the_former_job(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = check_settings(MINIMAL_SETTINGS | {"run": {**MINIMAL_SETTINGS["run"], "folder": str(run)}}, "test")
    save(run, 2)
    claim_run_folder(run, dump_settings(settings))
    with start(FORMER, str(run)) as former:
        assert former.stdout
        assert former.stdin
        assert former.stdout.readline() == "holds\n"
        with start(NEXT, dump_settings(settings)) as following:
            assert following.stdout
            assert "another job" in following.stdout.readline()
            former.stdin.write("\n")
            former.stdin.flush()
            assert following.stdout.read() == "4 []\n"
    assert (former.returncode, following.returncode) == (0, 0)
