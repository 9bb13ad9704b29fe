"""The process that an engine host starts: `python -m grpo_mp.rollout.engine_main`, arguments as JSON in the environment.

It splits in two before anything heavy is imported. The child becomes the SGLang server. The parent watches: when
the server ends, or when the trainer that started it is gone however it ended, it kills the whole process group.
"""

import json
import os
import signal
import sys
import time

ARGUMENTS = "GRPO_MP_ENGINE_ARGUMENTS"  # ServerArgs as JSON: by environment, since it holds the engine's key
WATCH_INTERVAL_S = 0.2


def main() -> None:
    """Never returns in the watching half: the group, itself included, is killed at the end."""
    trainer = os.getppid()
    server = os.fork()
    if server == 0:
        _serve(json.loads(os.environ[ARGUMENTS]))
    else:
        _watch(server, trainer)


def _watch(server: int, trainer: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a TERM to the group is meant for SGLang
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while os.getppid() == trainer:
        ended, status = os.waitpid(server, os.WNOHANG)
        if ended:
            print(f"engine process ended: {_describe(os.waitstatus_to_exitcode(status))}", flush=True)
            break
        time.sleep(WATCH_INTERVAL_S)
    os.killpg(0, signal.SIGKILL)


def _describe(code: int) -> str:
    return f"status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _serve(arguments: dict[str, object]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which stops its engines itself
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    run_server(ServerArgs(**arguments))  # type: ignore[arg-type]
    sys.exit(0)


if __name__ == "__main__":
    main()
