"""A child process that answers, refuses, writes junk, dies, or does not answer."""

import subprocess
import sys
import time

import pytest

from grpo_mp.utils.json_worker import JsonWorker, WorkerEndedError

PROGRAM = """
import json, sys, time
for line in sys.stdin:
    do = json.loads(line)["do"]
    if do == "die":
        sys.exit("no more memory")
    if do == "sleep":
        time.sleep(600)
    print({"double": '{"value": [1, 1]}', "refuse": '{"error": "no such file"}'}.get(do, "junk"), flush=True)
"""


@pytest.fixture
def worker() -> JsonWorker:
    pipe = subprocess.PIPE
    return JsonWorker(subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=pipe, stdout=pipe, stderr=pipe))


def test_it_answers_until_it_is_ended(worker: JsonWorker) -> None:
    assert worker.ask({"do": "double"}, 60.0) == [1, 1]
    with pytest.raises(OSError, match=r"^no such file$"):
        worker.ask({"do": "refuse"}, 60.0)
    assert worker.ask({"do": "double"}, 60.0) == [1, 1]
    assert worker.end() == worker.end() == ""
    with pytest.raises(WorkerEndedError):
        worker.ask({"do": "double"}, 60.0)


@pytest.mark.parametrize(("do", "reason"), [("die", "no more memory"), ("junk", "the process does not answer")])
def test_an_answer_that_is_none_ends_it(worker: JsonWorker, do: str, reason: str) -> None:
    with pytest.raises(WorkerEndedError, match=f"^{reason}$"):
        worker.ask({"do": do}, 60.0)
    assert worker.process.poll() is not None


def test_it_is_killed_at_the_time_limit(worker: JsonWorker) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerEndedError, match=r"^the process does not answer$"):
        worker.ask({"do": "sleep"}, 0.5)
    assert 0.5 <= time.monotonic() - began < 300  # the child sleeps for 600 s
    assert worker.process.poll() is not None
