"""Start the engine of each recipe up to the first call that needs a GPU; `tests.bench.gpu_wheels` runs this.

Standard input: {"folder": of the logs, "specs": {"recipe": fields of its EngineSpec}} as JSON. SGLang is imported once,
and each engine is a fork of this process that runs the engines' main module with the arguments and the environment of
a job. The smallest engine is also started by a job's own commands. The runtime of `gpu_wheels` answers questions about
eight H100s, and refuses calls that need one. Prints where each engine ended: a line begins with FAILED if it was not
at a refused call.
"""

import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from grpo_mp.distributed.ports import claim_ports
from grpo_mp.rollout import engine_main
from grpo_mp.rollout.engine_args import EngineSpec, engine_arguments, engine_environment, ports_needed
from grpo_mp.rollout.server import EngineProcess
from grpo_mp.utils.errors import EngineError, EngineTimeout

REFUSE = "GRPO_MP_REFUSE_GPUS"  # a variable that is set where the runtime refuses calls
REFUSED = re.compile(r"^refused: (\w+)", re.MULTILINE)
REFUSAL = "CUDA error: an error of a runtime without a GPU"
FRAME = re.compile(r'File ".*/site-packages/(sglang/\S+)", line (\d+)')
TRACEBACK = "Traceback (most recent call last)"
LIMIT_S = 300.0
POLL_INTERVAL_S = 0.2


def main() -> None:
    """Start every engine, and print where it ended."""
    cases = json.load(sys.stdin)
    folder = Path(cases["folder"])
    folder.mkdir(exist_ok=True)
    specs = {name: EngineSpec(**{**fields, "model": Path(fields["model"])}) for name, fields in cases["specs"].items()}
    # Without the memory saver's library, which SGLang itself adds for its schedulers.
    os.environ["LD_PRELOAD"] = os.environ["LD_PRELOAD"].rpartition(":")[2]
    smallest = min(specs, key=lambda name: specs[name].gpus)
    report(f"{smallest} by commands", specs[smallest], folder, run_by_commands)
    share_imports()
    for name, spec in specs.items():
        report(name, spec, folder, run_in_fork)


def report(name: str, spec: EngineSpec, folder: Path, start: Callable[[EngineSpec, Path], bool]) -> None:
    """Start an engine and print where it ended."""
    log = folder / f"{name.replace(' ', '_')}.log"
    ended = start(spec, log)
    text = log.read_text(errors="replace")
    refused = REFUSED.search(text)
    error = text.find(REFUSAL)
    if ended and refused and error > 0 and TRACEBACK not in text[: refused.start()]:
        schedulers = f"{len(REFUSED.findall(text))} of {spec.gpus // spec.nodes} schedulers"
        file, line = FRAME.findall(text, refused.end(), error)[-1]
        print(f"reached {refused[1]} at {file}:{line} by {schedulers}: {name}", flush=True)
        return
    last = (text.splitlines() or ["no output"])[-1]
    print(f"FAILED {name}: {'ended' if ended else 'did not end'}, {log}: {last[:200]}", flush=True)


def run_by_commands(spec: EngineSpec, log: Path) -> bool:
    """Start an engine as a job does; return whether it ended by itself."""
    os.environ[REFUSE] = "1"
    engine = EngineProcess(spec, log)
    engine.start()
    try:
        engine.wait_ready(LIMIT_S)
    except EngineError as error:
        return not isinstance(error, EngineTimeout)
    finally:
        engine.stop()
        del os.environ[REFUSE]
    return False


def share_imports() -> None:
    """Import what the processes of an engine import, and have SGLang fork them instead of spawning them."""
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.data_parallel_controller
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import torch

    torch.cuda._is_in_bad_fork = lambda: False  # type: ignore[assignment]  # this runtime has no state
    multiprocessing.set_start_method("fork", force=True)
    sglang.srt.entrypoints.engine.mp.set_start_method = lambda *_, **__: None


def run_in_fork(spec: EngineSpec, log: Path) -> bool:
    """Run the engines' main module in a fork of this process; return whether it ended by itself."""
    claim = claim_ports(ports_needed(spec))
    try:
        with tempfile.TemporaryDirectory() as scratch:
            arguments = engine_arguments(spec, claim.port, "name", "key")
            environment = engine_environment(spec, arguments, scratch, os.environ)
            child = os.fork()
            if child == 0:
                run_engine(environment, log)
            with other_nodes(arguments):
                return wait_for(child)
    finally:
        claim.release()


@contextmanager
def other_nodes(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Ask the engine's first node for the ports of its replicas, as its other nodes do; it waits for them all."""
    import zmq
    from sglang.srt.managers.io_struct import sock_send, wrap_as_pickle
    from sglang.srt.server_args import DP_ATTENTION_HANDSHAKE_PORT_DELTA

    context = zmq.Context()
    host, _, port = (arguments["dist_init_addr"] or "").rpartition(":")
    for node in range(1, arguments["nnodes"]):
        request = context.socket(zmq.REQ)
        request.connect(f"tcp://{host}:{int(port) + DP_ATTENTION_HANDSHAKE_PORT_DELTA}")
        sock_send(request, wrap_as_pickle(str(node)))
    try:
        yield
    finally:
        context.destroy(linger=0)


def run_engine(environment: Mapping[str, str], log: Path) -> NoReturn:
    """Become an engine's main process: its own session, environment and log."""
    try:
        os.setsid()
        with log.open("wb") as output:
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
        os.environ.clear()
        os.environ.update(environment, **{REFUSE: "1"})
        engine_main.main()
    except BaseException:  # noqa: BLE001 - a fork of the caller must not return
        traceback.print_exc()
    finally:
        os._exit(1)


def wait_for(child: int) -> bool:
    """Wait for the end of a process, and kill its session; return whether it ended by itself in time."""
    deadline = time.monotonic() + LIMIT_S
    while not (ended := os.waitpid(child, os.WNOHANG)[0] == child) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    return ended


if __name__ == "__main__":
    main()
