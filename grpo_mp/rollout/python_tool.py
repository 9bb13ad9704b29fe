"""Python as a tool, in the jail of `reward.code`, with names that live through the turns of an episode."""

import weakref
from functools import cache
from typing import Any

from grpo_mp.rewards.sandbox import Sandbox
from grpo_mp.rewards.session import Session, SessionEndedError
from grpo_mp.rewards.settings import SandboxLimits
from grpo_mp.rollout.protocol import BoundedTools

SECTION = "rollout.tool_args grpo_mp.rollout.python_tool:Python"


class Python(BoundedTools):
    """One episode's interpreter, a process of its own from the first call on."""

    def __init__(self, **limits: Any) -> None:
        """Take `isolation`, `parallel`, `timeout_s` and so on, as `reward.code` does, of each call.

        Raises UserError where this machine cannot isolate programs.
        """
        own = SandboxLimits(**limits)
        self.parallel, self.timeout_s, self._sandbox = own.parallel, own.timeout_s, _sandbox(own)
        self._session: Session | None = None

    def python(self, code: str) -> str:
        """
        Run Python code and return what it prints, and the value of its last line. Names are kept for later calls.

        Args:
            code: the code to run
        """
        if self._session is None:
            self._session = Session(self._sandbox)
            weakref.finalize(self, self._session.end)
        try:
            return self._session.run(code)
        except SessionEndedError:
            self._session = None
            raise


@cache
def _sandbox(limits: SandboxLimits) -> Sandbox:
    """Return the process's sandbox of these limits."""
    return Sandbox(limits, SECTION)
