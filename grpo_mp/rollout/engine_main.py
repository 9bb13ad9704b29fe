"""The SGLang server of an engine: `python -m grpo_mp.rollout.engine_main`, with ServerArgs in the environment."""

import json
import os
import signal

ARGUMENTS = "GRPO_MP_ENGINE_ARGUMENTS"  # ServerArgs as JSON: by environment, since it holds the engine's key


def main() -> None:
    """Run the server until it has ended."""
    for number in (signal.SIGINT, signal.SIGUSR1):  # for the trainer, which then ends its engines or saves
        signal.signal(number, signal.SIG_IGN)
    arguments = json.loads(os.environ.pop(ARGUMENTS))

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    run_server(ServerArgs(**arguments))


if __name__ == "__main__":
    main()
