"""launch/common.sh between commands of Slurm's that are not Slurm's: what it asks of them, and in which order."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from grpo_mp.cli.slurm_job import first_failure

ROOT = Path(__file__).parents[2]
NODES = ("n1", "n2")
# Each notes what it was asked. What happens in a step, or while a question is answered, is a test's own.
COMMANDS = {
    "sinfo": 'if [ -f "$FOLDER/states" ]; then source "$FOLDER/states"; fi',
    "scontrol": """
        case "$1 $2" in
          "show hostnames") printf '%s\\n' {nodes} ;;
          "show node") echo "   NodeAddr=127.0.0.1 NodeHostName=$3 Version=22" ;;
          *) echo "$*" >>"$NOTES" ;;
        esac""",
    "srun": """
        for argument in "$@"; do case $argument in --output=*) log=${{argument#--output=}} ;; esac; done
        attempt=$(dirname "$log")
        case $* in
          *grpo_mp.cli.slurm_nodes*) step=check ;;
          *) step=train ;;
        esac
        echo "$step" >>"$NOTES"
        echo output >"${{log/\\%t/0}}"
        cd "$attempt"
        if [ -f "$FOLDER/$step" ]; then source "$FOLDER/$step"; fi""",
    "bin/python": """
        if [ "$2" != grpo_mp.cli.slurm_job ]; then exec {python} "$@"; fi
        case $3 in
          folder) echo "$FOLDER/run" ;;
          begin) mkdir -p "$6" && echo 0 >"$6/saved_step" ;;
          show) ;;
          failure) if [ "$4" = --told-to-save ]; then echo failure told; else echo failure; fi >>"$NOTES" ;;
          *) echo "$3" >>"$NOTES" ;;
        esac
        if [ -f "$FOLDER/$3" ]; then source "$FOLDER/$3"; fi""",
}


SLURM = ("sinfo", "scontrol")  # what asks the controller


class Script:
    """A batch script that runs in an allocation of nodes of a rank each, whose attempts are in `folder`."""

    def __init__(self, folder: Path, nodes: Sequence[str] = NODES) -> None:
        self._folder = folder
        self._notes = folder / "notes"
        self._nodes = nodes
        (folder / "bin").mkdir()
        for name, text in COMMANDS.items():
            text = text.format(nodes=" ".join(nodes), python=sys.executable) if "{" in text else text
            slurm = 'if [ -f "$FOLDER/slurm" ]; then source "$FOLDER/slurm"; fi' if name in SLURM else ""
            (folder / name).write_text(f"#!/usr/bin/env bash\nset -eu\n{slurm}\n{text}\n")
            (folder / name).chmod(0o755)

    def when(self, what: str, commands: str) -> None:
        """Run shell commands in the step `check` or `train`, or during a command of slurm_job.

        `states`: what prints a line for each node, as "n1 down*"; `slurm`: what comes before each question to Slurm.
        """
        (self._folder / what).write_text(commands)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        allocation = {
            "SLURM_JOB_ID": "12",
            "SLURM_JOB_NUM_NODES": str(len(self._nodes)),
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_NTASKS_PER_NODE": "1",
            "SLURM_SUBMIT_DIR": str(ROOT),
        }
        others = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        paths = {"FOLDER": str(self._folder), "NOTES": str(self._notes), "VENV": str(self._folder)}
        return subprocess.run(
            ["bash", str(ROOT / "launch" / "tiny_moe.sh"), *arguments],
            env={**others, **allocation, **paths, "PATH": f"{self._folder}:{os.environ['PATH']}", **environment},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=600.0,
        )

    @property
    def notes(self) -> list[str]:
        return self._notes.read_text().splitlines()


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


SILENT = """
if [ "${2:-}" = hostnames ]; then return; fi  # Slurm's command asks nobody
asked=$FOLDER/asked.$(basename "$0").$1.${2//\\//_}
echo >>"$asked"
if [ "$(wc -l <"$asked")" -le TIMES ]; then exit 1; fi
"""


@pytest.mark.parametrize("states", ["n1 down*", "n1 idle"])
def test_a_controller_that_is_silent_for_a_while_is_asked_again(states: str, script: Script) -> None:
    script.when("slurm", SILENT.replace("TIMES", "2"))
    script.when("states", f"echo {states}; echo n2 idle")
    script.when("train", "kill -USR1 $PPID; sleep 0.5")
    process = script.run(RETRY_S="0.01")
    assert (process.returncode, process.stderr) == (0, "")
    assert script.notes[-1] == "requeue 12"
    assert ("train" in script.notes) == (states == "n1 idle")


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"SPARES": "abc"}, "SPARES=abc: give a number"),
        ({"SPARES": "2"}, "SPARES=2 leaves none of the job's 2 nodes: ask for more"),
    ],
)
def test_numbers_that_are_none(environment: dict[str, str], sentence: str, script: Script) -> None:
    process = script.run(**environment)
    assert (process.returncode, process.stderr) == (2, f"error: {sentence}\n")


FAILS_ONCE = 'if [ "$(grep -c train "$NOTES")" = 1 ]; then exit 1; fi'


def test_a_failed_rank_is_followed_by_another_attempt(script: Script) -> None:
    script.when("train", FAILS_ONCE)
    script.when("has-steps-left", "exit 1")
    process = script.run()
    assert (process.returncode, process.stderr) == (0, "")
    first = ["check", "train"]
    second = ["check", "train", "has-steps-left"]
    assert script.notes == [*first, "failure", *second]


def test_the_time_limit_between_two_attempts_is_not_forgotten(script: Script) -> None:
    script.when("train", "exit 1")
    script.when("failure", "kill -USR1 $PPID")
    process = script.run()
    assert (process.returncode, process.stderr) == (0, "")
    assert script.notes == ["check", "train", "failure", "requeue 12"]


def test_the_time_limit_before_training(script: Script) -> None:
    script.when("begin", "kill -USR1 $PPID; sleep 0.5")
    process = script.run()
    assert (process.returncode, process.stderr) == (0, "")
    assert script.notes == ["requeue 12"]


@pytest.mark.parametrize(
    ("environment", "end"),
    [
        ({}, "resumes in a new attempt"),
        ({"RESTARTS": "0"}, "the job ends, RESTARTS=0; the same command resumes the run"),
    ],
)
def test_a_job_without_restarts_ends_at_the_time_limit(environment: dict[str, str], end: str, script: Script) -> None:
    """What it has saved is kept, and its status is that of a job that did as it was told."""
    script.when("train", "trap '' USR1; kill -USR1 $PPID; sleep 0.5")
    process = script.run(**environment)
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.endswith(f"saved before the time limit, or for another job: {end}\n")
    assert ("requeue 12" in script.notes) == (environment == {})


@pytest.mark.parametrize("stopped", [True, False])
def test_the_time_limit_undoes_no_stop_on_purpose(stopped: bool, script: Script) -> None:
    """A guard stops the run in the step in which the signal comes. Another failure is resumed."""
    script.when("train", "trap '' USR1; kill -USR1 $PPID; sleep 0.5; exit 2")
    script.when("failure", "exit 1" if stopped else "exit 0")
    process = script.run()
    assert (process.returncode, process.stderr) == (2 if stopped else 0, "")
    assert script.notes == ["check", "train", "failure told", *([] if stopped else ["requeue 12"])]


def test_a_check_that_the_time_limit_ends_blames_no_node(script: Script) -> None:
    script.when("check", "kill -USR1 $PPID; exit 138")
    process = script.run()
    assert (process.returncode, process.stderr) == (0, "")
    assert script.notes == ["check", "requeue 12"]


def test_the_time_limit_in_training_is_handed_on(script: Script) -> None:
    script.when("train", "trap 'echo told >>\"$NOTES\"; kill %1; exit' USR1; sleep 60 & kill -USR1 $PPID; wait")
    process = script.run()
    assert (process.returncode, process.stderr) == (0, "")
    assert script.notes == ["check", "train", "told", "has-steps-left", "requeue 12"]


@pytest.fixture
def with_spare(tmp_path: Path) -> Script:
    return Script(tmp_path, ("n1", "n2", "n3"))


def lost_after(step: str, *nodes: str) -> str:
    """Return what shows nodes as lost once a step has run."""
    return f'if grep -q {step} "$NOTES" 2>/dev/null; then printf "%s down*\\n" {" ".join(nodes)}; fi'


def test_a_job_that_lost_more_nodes_than_it_has_spares_is_requeued(with_spare: Script) -> None:
    """Slurm does not requeue it: it was told to keep the nodes that are left."""
    with_spare.when("states", lost_after("train", "n2", "n3"))
    with_spare.when("train", "exit 1")
    process = with_spare.run(SPARES="1")
    assert (process.returncode, process.stderr) == (0, "")
    assert with_spare.notes == ["check", "train", "failure", "requeue 12"]
    assert "1 nodes are up and fit, the job needs 2: resumes in a new attempt\n" in process.stdout


NOT_STARTED = "srun: error: Task launch for StepId=12.0 failed on node n2: Communication connection failure"


def test_a_check_that_srun_cannot_start_names_the_node(with_spare: Script) -> None:
    """Slurm does not know yet that its host is dead; there is no log, and srun ends its other tasks."""
    with_spare.when("check", f"rm check_0.log; echo '{NOT_STARTED}' >&2; exit 143")
    with_spare.when("lost-nodes", 'printf n2 >"$4/bad_nodes"')
    with_spare.when("train", NOTE_NODES)
    with_spare.when("has-steps-left", "exit 1")
    process = with_spare.run(SPARES="1")
    assert (process.returncode, process.stderr) == (0, "")
    assert with_spare.notes == ["check", "lost-nodes", "train", "nodelist=n1,n3", "has-steps-left"]


NOTE_NODES = 'grep -o "nodelist=[^ ]*" <<<"$*" >>"$NOTES"'


def test_what_srun_says_of_the_check_is_not_taken_for_the_failure_of_training(with_spare: Script) -> None:
    with_spare.when(
        "check", "echo 'srun: error: n1: task 0: Exited with exit code 3' >&2; printf n1 >bad_nodes; exit 3"
    )
    with_spare.when("train", "echo 'srun: error: n3: task 1: Killed' >&2; exit 1")
    with_spare.when("failure", "exit 1")
    process = with_spare.run(SPARES="1")
    assert (process.returncode, process.stderr) == (1, "")
    failure = first_failure(with_spare._folder / "run" / "attempts" / "12.0")
    assert (failure.reason, failure.killed) == ("Killed on n3", True)


@pytest.mark.parametrize("spares", ["0", "1"])
def test_a_job_with_too_few_nodes_of_which_one_is_bad_ends(spares: str, with_spare: Script) -> None:
    """A requeued one might get the bad node again."""
    with_spare.when("check", "printf n1 >bad_nodes; exit 3")
    with_spare.when("states", lost_after("train", "n3"))
    with_spare.when("train", "exit 1")
    process = with_spare.run(SPARES=spares)
    assert process.returncode == 2
    assert "submit it again with --exclude=n1, or with --spares; the run resumes" in process.stderr
    assert with_spare.notes == (["check"] if spares == "0" else ["check", "train", "failure"])
