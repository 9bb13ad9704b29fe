"""The tools `bash` and `edit` in a sandbox that holds the repository of a data row; its tests give the reward."""

import json
import shlex
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

from grpo_mp.sandbox.protocol import Limits, Sandbox
from grpo_mp.sandbox.sandboxes import CONTAINERS, Sandboxes, check_container_program

SECTION = "rollout.tool_args grpo_mp.rollout.workspace_tool:Workspace"
LIMITS = Limits(memory_bytes=2**31, processes=64, file_bytes=2**29, folder_bytes=2**29)
STATUS_OF_TIME_LIMIT = "the command was ended at its time limit"


class Workspace:
    """A repository in a sandbox of its own for each episode. Columns of the data row, see `reset`, make it."""

    def __init__(
        self,
        sandbox: str = "bubblewrap",
        folder: str = ".",
        timeout_s: float = 30.0,
        test_timeout_s: float = 120.0,
        limits: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Check the sandbox.

        `sandbox`: its kind, see Sandboxes. `folder`: of the repository, in which commands run. Both may have columns of
        the data row in braces, as in "docker:{image}". `timeout_s`: of one command; `limits`: of the sandbox that
        differ from LIMITS, such as {"network": True}.
        """
        self._kind = sandbox
        self._folder = folder
        self._timeout_s = timeout_s
        self._test_timeout_s = test_timeout_s
        self._limits = replace(LIMITS, **limits)
        if "{" not in sandbox:
            _sandboxes(sandbox, self._limits)
        elif (program := sandbox.partition(":")[0]) in CONTAINERS:
            check_container_program(SECTION, program)
        self._columns: Mapping[str, Any] = {}
        self._sandbox: Sandbox

    def reset(self, **columns: Any) -> None:
        """Start the sandbox and write the repository.

        Columns: `files` {path: text}, written first; `setup`, a command run after that; `tests` {path: text}, written
        when the episode has ended; `test_command`, whose exit status 0 is reward 1 (default: python3 -m pytest -q);
        `test_timeout_s`, its time limit instead of the argument.
        With `reward_from_output` the last line that the command prints is the reward: a number, or JSON with `reward`.
        """
        self._columns = columns
        self._folder = self._folder.format_map(columns)
        self._sandbox = _sandboxes(self._kind.format_map(columns), self._limits).start()
        weakref.finalize(self, self._sandbox.stop)
        self._write(columns.get("files"))
        if setup := columns.get("setup"):
            outcome = self._run(setup, self._test_timeout_s)
            if outcome.status != 0:
                raise RuntimeError(f"the setup of the row failed: {outcome.stderr[-500:] or outcome.stdout[-500:]}")

    def bash(self, command: str) -> str:
        """
        Run a command of bash in the repository and return what it prints. Each command starts in the same folder.

        Args:
            command: the command
        """
        outcome = self._run(command, self._timeout_s)
        ending = STATUS_OF_TIME_LIMIT if outcome.status is None else f"exit status {outcome.status}"
        return outcome.stdout + outcome.stderr + ("" if outcome.status == 0 else f"\n({ending})")

    def edit(self, path: str, old: str, new: str) -> str:
        """
        Replace a text in a file. Without the old text, write the new text as the whole file.

        Args:
            path: the file
            old: the text to replace, which must occur once; empty to write the whole file
            new: the text instead
        """
        if not old:
            self._sandbox.write(self._place(path), new.encode())
            return f"wrote {path}"
        text = self._sandbox.read(self._place(path)).decode()
        if (count := text.count(old)) != 1:
            raise ValueError(f"the old text occurs {count} times in {path}: give a text that occurs once")
        self._sandbox.write(self._place(path), text.replace(old, new).encode())
        return f"edited {path}"

    def get_reward(self) -> float:
        """Write the tests, run the test command, and return the reward, see `reset`."""
        self._write(self._columns.get("tests"))
        command = self._columns.get("test_command") or "python3 -m pytest -q"
        outcome = self._run(command, self._columns.get("test_timeout_s") or self._test_timeout_s)
        if outcome.status is None or not self._columns.get("reward_from_output"):
            return float(outcome.status == 0)
        return read_number(outcome.stdout)

    def _run(self, command: str, timeout_s: float) -> Any:
        in_folder = f"cd {shlex.quote(self._folder)} || exit 1\n{command}"
        return self._sandbox.exec(["bash", "-c", in_folder], timeout_s=timeout_s)

    def _write(self, files: Mapping[str, str] | None) -> None:
        for path, text in (files or {}).items():
            self._sandbox.write(self._place(path), text.encode())

    def _place(self, path: str) -> str:
        return f"{self._folder}/{path}" if not path.startswith("/") else path


def read_number(output: str) -> float:
    """Return the reward in the last line of an output; 0 if there is none, because the tests did not end."""
    lines = output.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else 0.0
    except ValueError:
        return 0.0
    value = value.get("reward") if isinstance(value, dict) else value
    return float(value) if isinstance(value, int | float) else 0.0


@cache
def _sandboxes(kind: str, limits: Limits) -> Sandboxes:
    return Sandboxes(SECTION, kind, limits)
