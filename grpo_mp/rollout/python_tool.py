"""Python interpreter as a tool, in a sandbox; variables persist over the turns of an episode."""

import weakref
from functools import cache
from pathlib import Path

from grpo_mp.rollout.protocol import BoundedTools
from grpo_mp.sandbox.sandboxes import GRACE_S, PARALLEL, Sandboxes
from grpo_mp.utils.json_worker import JsonWorker, WorkerEndedError

SECTION = "rollout.tool_args grpo_mp.rollout.python_tool:Python"
INTERPRETER = Path(__file__).with_name("python_session.py").read_text()
INTERRUPT_S = 1.0  # the interpreter is killed this long after the time limit, if its alarm did not interrupt the code


class Python(BoundedTools):
    """Tool with one interpreter process for each episode, started by the first call."""

    parallel = PARALLEL

    def __init__(self, timeout_s: float = 5.0, sandbox: str = "bubblewrap") -> None:
        """Check the sandbox. `timeout_s`: time limit of one call; `sandbox`: its kind, see Sandboxes."""
        self._timeout_s = timeout_s
        self._sandboxes = _sandboxes(sandbox)
        self._interpreter: JsonWorker | None = None

    def python(self, code: str) -> str:
        """
        Run Python code and return what it prints, and the value of its last line. Names are kept for later calls.

        Args:
            code: the code to run
        """
        try:
            if self._interpreter is None:
                self._interpreter = JsonWorker(self._sandboxes.popen(INTERPRETER, str(self._timeout_s)))
                weakref.finalize(self, self._interpreter.end)
                self._interpreter.ask({"code": ""}, GRACE_S)  # so that the start does not count toward the time limit
            printed = self._interpreter.ask({"code": code}, self._timeout_s + INTERRUPT_S)
        except WorkerEndedError as error:
            self._interpreter = None
            message = "the interpreter was ended, and its names are lost: the code ended or held it"
            raise WorkerEndedError(message) from error
        return str(printed).rstrip("\n")


@cache
def _sandboxes(kind: str) -> Sandboxes:
    return Sandboxes(SECTION, kind)
