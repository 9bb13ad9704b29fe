"""Look at a run while it goes on: grpo-mp watch RUN

Curves, what the ranks are in, engines, warnings and the last samples, live in the terminal until Ctrl-C. The run may
not have started, or may have ended. With --serve its report instead, in a browser: made anew as the run goes on.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from grpo_mp.utils.parsers import Parser, count_up_to, non_negative

LAST_PORT = 2**16 - 1


def main(arguments: Sequence[str]) -> int:
    """Run the command line, see the text above; return the exit status. Raises UserError."""
    parser = Parser("grpo-mp watch", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run.folder of a run")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument("--every-s", type=non_negative, default=1.0, metavar="S", help="between frames (default: 1)")
    parser.add_argument("--serve", action="store_true", help="the report, live on loopback, behind a key in the URL")
    port = "with --serve: port (default: a free one)"
    parser.add_argument("--port", type=count_up_to(LAST_PORT), default=0, metavar="N", help=port)
    args = parser.parse_args(arguments)
    try:
        if args.serve:
            asyncio.run(serve(args.run, args.port))
        else:
            show(args.run, args.once, args.every_s)
    except KeyboardInterrupt:
        pass  # the way to leave
    return 0


def show(folder: Path, once: bool, every_s: float) -> None:
    """Show frames until Ctrl-C, or one. Raises UserError for what is no folder."""
    from rich.console import Console
    from rich.live import Live

    from grpo_mp.monitor.watch.screen import Frame
    from grpo_mp.monitor.watch.state import RunReader

    reader, console = RunReader(folder), Console(highlight=False)
    if once:
        console.print(Frame(reader.read()))
        return
    with Live(Frame(reader.read()), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            time.sleep(every_s)
            live.update(Frame(reader.read()), refresh=True)


async def serve(folder: Path, port: int) -> None:
    """Serve the report of a run until Ctrl-C. Raises UserError where the port is taken."""
    from grpo_mp.monitor.report.page import live, waiting_page
    from grpo_mp.monitor.watch.server import LivePage, page_maker, serving

    script = live()
    page = LivePage(folder, page_maker(folder, script), page=waiting_page(script))
    async with serving(page, port) as url:
        print(f"{url}\nOnly this machine reaches it; Ctrl-C ends it.", flush=True)
        await page.follow()
