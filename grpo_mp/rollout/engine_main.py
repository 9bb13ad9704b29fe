"""Main module of an engine process: runs an SGLang server with the ServerArgs from the environment.

Command: `python -m grpo_mp.rollout.engine_main`.
"""

import gc
import json
import os
import signal

# Variable with ServerArgs as JSON. They contain the engine's key, which a command line would expose to other users.
ARGUMENTS = "GRPO_MP_ENGINE_ARGUMENTS"


def main() -> None:
    """Run the server until it exits."""
    for number in (signal.SIGINT, signal.SIGUSR1):  # the trainer handles these signals and stops its engines itself
        signal.signal(number, signal.SIG_IGN)
    arguments = json.loads(os.environ.pop(ARGUMENTS))
    gc.disable()  # it would take a fifth of the time of the imports

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    gc.freeze()  # SGLang collects garbage when it starts: it would walk through all objects of the imports
    gc.enable()
    try:
        run_server(ServerArgs(**arguments))
    finally:
        gc.unfreeze()  # extension modules report what is not collected at the exit
        # Otherwise Python waits for the detokenizer for ever if the scheduler was killed during the start.
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
