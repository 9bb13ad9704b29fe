"""The report of a run, live on loopback: made anew when the run has written more, and shown to who has the key."""

import asyncio
import hmac
import html
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import xxhash
from aiohttp import web

from grpo_mp.checkpoint.run_state import METRICS
from grpo_mp.monitor.plan_file import PLAN
from grpo_mp.monitor.report.build import build_report
from grpo_mp.monitor.report.page import Drawings, Live, render
from grpo_mp.monitor.report.records import RunFolder
from grpo_mp.monitor.rules import WarningsOfGrowingRun
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.log import server_log

LOOPBACK = "127.0.0.1"
SHOWN = (METRICS, "eval", "samples", PLAN)  # whose change makes a new page; scores come behind the metrics of step 0
LOOK_EVERY_S = 2.0  # at these
REST = 4.0  # times as long as a page took to make, until the next is made: the run has the processors
HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
# What may be raised for files that are not this version's.
UNREADABLE = (OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
MakePage = Callable[[], str]


@dataclass
class LivePage:
    """The page of a run folder, as it was made last; its own script asks for what is new.

    `make` reads of the run what is new, and draws what has changed. It is made while somebody looks.
    """

    folder: Path
    make: MakePage
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    page: str = ""  # at first, of a run that has no step
    problem: str = ""  # why the page is not of what is there now
    _made_of: tuple[tuple[int, int] | None, ...] = ()  # SHOWN: sizes and times
    _asked: bool = True  # since it was made

    async def follow(self) -> None:
        """Make the page whenever the run has written more, in a thread: requests get the former one meanwhile."""
        while True:
            began_s = time.monotonic()
            if self._asked:
                self._asked = False
                await self.refresh()
            await asyncio.sleep(max(LOOK_EVERY_S, REST * (time.monotonic() - began_s)))

    async def refresh(self) -> None:
        """Make the page where the run has written more since."""
        state = tuple(map(self._state_of, SHOWN))
        if state == self._made_of and not self.problem:
            return
        try:
            self.page, self.problem = await asyncio.to_thread(self.make), ""
        except UserError as error:  # there is no step yet, or a line is being written
            self.problem = str(error)
        except UNREADABLE as error:
            self.problem = f"the page cannot be made: {type(error).__name__}: {one_line(error)}"
        self._made_of = state

    def _state_of(self, name: str) -> tuple[int, int] | None:
        try:
            stat = (self.folder / name).stat()  # that of a folder changes with the files in it
        except FileNotFoundError:
            return None
        return stat.st_size, stat.st_mtime_ns

    async def answer(self, request: web.Request) -> web.Response:
        """Return the page to who has the key."""
        if not hmac.compare_digest(request.query.get("key", "").encode(errors="replace"), self.key.encode()):
            raise web.HTTPUnauthorized(text="the key is missing or wrong: open the URL that grpo-mp watch printed\n")
        self._asked = True
        text = page_with(self.page, self.problem)
        tag = f'"{xxhash.xxh3_64_hexdigest(text.encode())}"'
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=HEADERS | {"ETag": tag})
        return web.Response(text=text, content_type="text/html", headers=HEADERS | {"ETag": tag})


def page_maker(folder: Path, script: Live | None) -> MakePage:
    """Return what makes the page of a run folder again and again: what it has read, found and drawn it keeps."""
    run, warnings, drawings = RunFolder(folder, folder.resolve().name), WarningsOfGrowingRun(), Drawings()
    return lambda: render(build_report([run.read()], warnings.find), script, drawings)


def page_with(page: str, problem: str) -> str:
    """Return a page, if there is one, that says above all else why it is no newer."""
    if not problem:
        return page
    page = page or '<!doctype html><html lang="en"><title>grpo-mp</title><body></body></html>'
    alert = f'<p id="live-problem" role="alert">This is not of the newest step: {html.escape(problem)}</p>'
    return page.replace("<body>", f"<body>{alert}", 1)


@asynccontextmanager
async def serving(live: LivePage, port: int = 0) -> AsyncIterator[str]:
    """Serve the page while the body runs, which lets it follow the run; on a port, 0: on a free one; yield its URL.

    Raises UserError where the port is taken.
    """
    app = web.Application()
    app.router.add_get("/", live.answer)
    runner = web.AppRunner(app, access_log=None, logger=server_log(__name__), shutdown_timeout=1.0)
    await runner.setup()
    await live.refresh()
    try:
        try:
            await web.TCPSite(runner, LOOPBACK, port).start()
        except OSError as error:
            raise UserError(f"--port {port}: {error.strerror}: choose another, or leave it out") from error
        yield f"http://{LOOPBACK}:{runner.addresses[0][1]}/?key={live.key}"
    finally:
        await runner.cleanup()
