"""Follow a run in the terminal: grpo-mp watch RUN

Shows curves, warnings and the latest samples until Ctrl-C. The run may have ended, or not started yet.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from grpo_mp.utils.parsers import Parser

EVERY_S = 2.0  # between frames


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status."""
    parser = Parser("grpo-mp watch", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run.folder of a run")
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    args = parser.parse_args(arguments)

    from rich.console import Console
    from rich.live import Live

    from grpo_mp.monitor.watch import frame  # torch is slow to import

    console = Console(highlight=False)
    if args.once:
        console.print(frame(args.run))
        return 0
    with (
        suppress(KeyboardInterrupt),  # the usual way to leave
        Live(frame(args.run), console=console, auto_refresh=False, screen=console.is_terminal) as live,
    ):
        while True:
            time.sleep(EVERY_S)
            live.update(frame(args.run), refresh=True)
    return 0
