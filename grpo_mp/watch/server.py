"""The report of a run, live on loopback: made anew when its metrics change, and shown to who has the key."""

import asyncio
import hmac
import html
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from grpo_mp.checkpoint.run_state import METRICS
from grpo_mp.errors import UserError

LOOPBACK = "127.0.0.1"
LOOK_EVERY_S = 2.0  # at the metrics
RELOAD_S = 15  # after which a browser asks again
HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "Refresh": str(RELOAD_S)}
MakePage = Callable[[Path], str]


@dataclass
class LivePage:
    """The page of a run folder, as it was made last."""

    folder: Path
    make: MakePage
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    page: str = ""
    problem: str = ""  # why the page is not of the metrics that are there now
    _made_of: tuple[int, int] | None = None  # metrics.jsonl: size and time

    async def follow(self) -> None:
        """Make the page whenever the metrics have changed, in a thread: requests get the former one meanwhile."""
        while True:
            await self.refresh()
            await asyncio.sleep(LOOK_EVERY_S)

    async def refresh(self) -> None:
        """Make the page where the metrics have changed since."""
        state = self._metrics()
        if state == self._made_of and self.page and not self.problem:
            return
        try:
            self.page, self.problem = await asyncio.to_thread(self.make, self.folder), ""
        except UserError as error:  # there is no step yet, or a line is being written
            self.problem = str(error)
        self._made_of = state

    def _metrics(self) -> tuple[int, int] | None:
        try:
            stat = (self.folder / METRICS).stat()
        except FileNotFoundError:
            return None
        return stat.st_size, stat.st_mtime_ns

    async def answer(self, request: web.Request) -> web.Response:
        """Return the page to who has the key."""
        if not hmac.compare_digest(request.query.get("key", "").encode(), self.key.encode()):
            raise web.HTTPUnauthorized(text="the key is missing or wrong: open the URL that grpo-mp watch printed\n")
        return web.Response(text=page_with(self.page, self.problem), content_type="text/html", headers=HEADERS)


def page_with(page: str, problem: str) -> str:
    """Return a page, if there is one, that says above all else why it is no newer."""
    if not problem:
        return page
    page = page or '<!doctype html><html lang="en"><title>grpo-mp</title><body></body></html>'
    alert = f'<p role="alert">This is not of the newest step: {html.escape(problem)}</p>'
    return page.replace("<body>", f"<body>{alert}", 1)


@asynccontextmanager
async def serving(live: LivePage, port: int = 0) -> AsyncIterator[str]:
    """Serve the page while the body runs, which lets it follow the run; on a port, 0: on a free one; yield its URL.

    Raises UserError where the port is taken.
    """
    app = web.Application()
    app.router.add_get("/", live.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
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
