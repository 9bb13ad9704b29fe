"""Runs an SGLang server as a child process that never outlives the run."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from grpo_mp.distributed.ports import PortClaim, claim_ports
from grpo_mp.rollout.engine_args import EngineSpec, engine_arguments, engine_environment, ports_needed
from grpo_mp.utils.errors import EngineError, EngineTimeout, UserError
from grpo_mp.utils.files import last_lines, open_private
from grpo_mp.utils.processes import with_descendants

COMMAND = [sys.executable, "-m", "grpo_mp.rollout.engine_main"]
POLL_INTERVAL_S = 0.1
PROBE_TIMEOUT_S = 5.0
STOP_LIMIT_S = 15.0  # more than the supervisor process needs to kill the engine's processes
LOG_LINES = 12
LOG_COLUMNS = 300  # lines are cut here, because SGLang writes all its arguments into one line


class EngineProcess:
    """An SGLang server, or this node's part of a multi-node server, as a child process in its own session.

    `start` does not wait, so that several engines start concurrently. If this process ends without `stop`, the server
    ends within a second.
    """

    def __init__(self, spec: EngineSpec, log: Path, kind: str = "engine") -> None:
        """Store the specification without starting the server. `kind`: prefix of the served model's name."""
        self.spec = spec
        self.log = log
        self.served_model_name = f"{kind}-{spec.index}-{secrets.token_hex(8)}"
        self.api_key = secrets.token_hex(16)
        self._claim: PortClaim | None = None
        self.url = ""  # URL of the server after `start`
        self._scratch = ""  # folder of the engine's temporary files
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, host: str | None = None, dist_init_addr: str | None = None) -> str | None:
        """Start the server process with an empty log file; return the rendezvous address of a multi-node engine.

        The host of a multi-node engine passes its own address as `host`; the other nodes pass the returned host:port
        as `dist_init_addr`.
        """
        self._claim = claim_ports(ports_needed(self.spec))
        port = self._claim.port
        self.url = f"http://127.0.0.1:{port}"
        dist_init_addr = f"{host}:{port + 1}" if host else dist_init_addr
        self._scratch = tempfile.mkdtemp(prefix="grpo_mp-engine-")
        arguments = engine_arguments(
            self.spec,
            port,
            served_model_name=self.served_model_name,
            api_key=self.api_key,
            dist_init_addr=dist_init_addr,
        )
        if self.spec.save_tokenizer:  # SGLang might load the model folder's tokenizer differently than the trainer
            arguments["tokenizer_path"] = str(Path(self._scratch, "tokenizer"))
            self.spec.save_tokenizer(arguments["tokenizer_path"])
        environment = engine_environment(self.spec, arguments, self._scratch, os.environ)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.unlink(missing_ok=True)
        with open(self.log, "xb", opener=open_private) as log:  # private, because SGLang logs the API key
            self._process = subprocess.Popen(
                with_descendants(COMMAND, self._scratch),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        return dist_init_addr

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until this server answers with its model name.

        Raises EngineError, with the last lines of the log, if the server ends or exceeds `timeout_s`, or if another
        server answers on its port.
        """
        deadline = time.monotonic() + timeout_s
        with httpx.Client(trust_env=False, timeout=PROBE_TIMEOUT_S, headers=self.headers) as client:
            while (served := self._served_model(client)) != self.served_model_name:
                if served is not None:
                    raise EngineError(f"{self._label()}: another server answered on its port {self.url}")
                self.check_alive("while starting")
                if time.monotonic() > deadline:
                    raise EngineTimeout(self._with_log_lines(f"{self._label()} did not come up within {timeout_s:g} s"))
                time.sleep(POLL_INTERVAL_S)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"}

    def check_alive(self, phase: str = "") -> None:
        """Raise EngineError with the last lines of the log if the server has ended. `phase`: for the message."""
        if self._process is None or self._process.poll() is not None:
            raise EngineError(self._with_log_lines(f"{self._label()} ended {phase}".rstrip()))

    def describe_end(self) -> str:
        """Return an error message with the last lines of the log if the server has ended; "" while it runs."""
        try:
            self.check_alive()
        except UserError as error:
            return str(error)
        return ""

    def keep_log(self, suffix: str) -> None:
        """Append `suffix` to the log's name, because `start` deletes the log of the previous process."""
        self.log.rename(self.log.with_name(f"{self.log.stem}_{suffix}{self.log.suffix}"))

    def stop(self) -> None:
        """Kill all processes of the engine, wait for them, and release ports and temporary files; idempotent."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # the server and its children then die with the supervisor
                self._process.wait(STOP_LIMIT_S)
        if self._claim:
            self._claim.release()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _served_model(self, client: httpx.Client) -> str | None:
        """Return the name of the model served on the port; None without a reply, "" for an unexpected reply."""
        try:
            reply = client.get(f"{self.url}/v1/models")  # /model_info does not name the model before SGLang 0.5.20
            return None if reply.is_server_error else str(reply.json()["data"][0]["id"])
        except (httpx.ConnectError, httpx.ReadError, httpx.TimeoutException):
            return None
        except (httpx.ProtocolError, ValueError, LookupError, TypeError):
            return ""

    def _label(self) -> str:
        return f"engine {self.spec.index} (rank {self.spec.rank}, {self.spec.model})"

    def _with_log_lines(self, sentence: str) -> str:
        lines = "\n".join(line[:LOG_COLUMNS] for line in last_lines(self.log, LOG_LINES)) or "(nothing)"
        status = self._process.poll() if self._process else None
        ended = "" if status is None else f" (exit status {status})"
        return f"{sentence}; the last lines of {self.log}{ended}:\n{lines}"
