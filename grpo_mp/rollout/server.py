"""One SGLang server as a child process: started, watched, ended, and never outliving the run."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import httpx

from grpo_mp.errors import PhaseTimeout, UserError
from grpo_mp.rollout.engine_args import (
    EngineSpec,
    check_arguments,
    engine_arguments,
    engine_environment,
    known_arguments,
    ports_needed,
)
from grpo_mp.rollout.ports import PortClaim, claim_ports

COMMAND = [sys.executable, "-m", "grpo_mp.rollout.engine_main"]
POLL_INTERVAL_S = 0.1
PROBE_TIMEOUT_S = 5.0
PORT_ATTEMPTS = 3
STOP_LIMIT_S = 15.0  # more than the engine's own watcher takes to end the group
LOG_LINES = 12
LOG_COLUMNS = 300  # SGLang writes all its arguments into one line


class Answer(Enum):
    """Who answers on an engine's port."""

    NONE = 0
    OURS = 1
    STRANGER = 2


class EngineProcess:
    """Starts one SGLang server (or this node's part of it) in its own session.

    `start` returns at once, `wait_ready` waits; so engines start side by side. Use as a context manager to
    be sure of `stop`. Even without it the server ends within a second of this process.
    """

    def __init__(self, spec: EngineSpec, log: Path, environment: Mapping[str, str] | None = None) -> None:
        """Checks the user's arguments. Raises UserError for an argument that SGLang does not know or the run owns."""
        check_arguments(spec.args, known_arguments())
        self.spec = spec
        self.log = log
        self.name = f"engine-{spec.index}-{secrets.token_hex(8)}"
        self.key = secrets.token_hex(16)
        self._base = dict(os.environ if environment is None else environment)
        self._claim: PortClaim | None = None
        self._meeting: str | None = None
        self._scratch = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where the server listens: http://127.0.0.1:port."""
        return f"http://127.0.0.1:{self._claimed().port}"

    @property
    def session(self) -> int:
        """Id of the session that holds every process of this engine."""
        if self._process is None:
            raise RuntimeError(f"{self._who()} was not started")
        return self._process.pid

    def start(self, host: str | None = None, meeting: str | None = None) -> str | None:
        """Start the processes; the log file is begun anew.

        For an engine over several nodes: `host` is this node's name for the others, given on the engine host, which
        returns host:port where they meet it; `meeting` is that answer, given on the others.
        """
        self._claim = claim_ports(ports_needed(self.spec))
        port = self._claim.port
        self._meeting = f"{host}:{port + 1}" if host else meeting
        self._scratch = tempfile.mkdtemp(prefix="grpo_mp_engine_")
        arguments = engine_arguments(self.spec, port, self.name, self.key, self._meeting)
        environment = engine_environment(self.spec, arguments, self._scratch, self._base)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.unlink(missing_ok=True)
        with open(self.log, "xb", opener=_private) as log:
            self._process = subprocess.Popen(
                COMMAND, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        return self._meeting

    def wait_ready(self, timeout_s: float) -> None:
        """Return when this very server answers; where somebody else took its port meanwhile, it starts anew.

        Raises UserError with the log's last lines when it ends or is not there after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        attempts = 1
        with httpx.Client(trust_env=False, timeout=PROBE_TIMEOUT_S, headers=self.headers) as client:
            while (answer := self._ask(client)) is not Answer.OURS:
                if answer is Answer.STRANGER:
                    self._start_elsewhere(attempts)
                    attempts += 1
                self.check_alive("while starting")
                if time.monotonic() > deadline:
                    raise PhaseTimeout(self._with_log(f"{self._who()} did not come up within {timeout_s:g} s"))
                time.sleep(POLL_INTERVAL_S)

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that every request to this engine needs."""
        return {"Authorization": f"Bearer {self.key}"}

    def check_alive(self, phase: str = "") -> None:
        """Raises UserError with the last lines of the log when the server has ended."""
        if self._process is None or self._process.poll() is not None:
            raise UserError(self._with_log(f"{self._who()} ended {phase}".rstrip()))

    def stop(self) -> None:
        """End every process of the engine and wait for it. Safe to call twice and on a dead engine."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # the server and its children die with their parents
                self._process.wait(STOP_LIMIT_S)
        if self._claim:
            self._claim.release()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> "EngineProcess":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _ask(self, client: httpx.Client) -> "Answer":
        try:
            reply = client.get(f"{self.url}/v1/models")  # /model_info does not name the model before SGLang 0.5.20
            if reply.is_server_error:
                return Answer.NONE
            return Answer.OURS if reply.json()["data"][0]["id"] == self.name else Answer.STRANGER
        except (httpx.ConnectError, httpx.ReadError, httpx.TimeoutException):
            return Answer.NONE
        except (httpx.ProtocolError, ValueError, LookupError, TypeError):
            return Answer.STRANGER

    def _start_elsewhere(self, attempts: int) -> None:
        if attempts == PORT_ATTEMPTS or self.spec.nodes > 1:  # the other nodes were told where this one is
            raise UserError(f"{self._who()}: somebody else served each of the {attempts} port(s) chosen for it")
        self.stop()
        self.start()

    def _claimed(self) -> PortClaim:
        if self._claim is None:
            raise RuntimeError(f"{self._who()} was not started")
        return self._claim

    def _who(self) -> str:
        return f"engine {self.spec.index} (rank {self.spec.rank}, {self.spec.model})"

    def _with_log(self, sentence: str) -> str:
        return f"{sentence}; the last lines of {self.log}:\n{last_lines(self.log, LOG_LINES)}"


def last_lines(log: Path, count: int) -> str:
    """The last `count` lines of a log that say something, long ones cut."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join([line[:LOG_COLUMNS] for line in lines if line.strip()][-count:]) or "(nothing)"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)  # SGLang writes its key into the log
