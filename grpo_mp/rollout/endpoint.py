"""Endpoint on loopback for OpenAI and Anthropic clients: the API key of a request selects the episode that answers."""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

from aiohttp import web

from grpo_mp.rollout import anthropic_requests, openai_requests
from grpo_mp.rollout.openai_requests import MODEL, ChatRequest, RequestError
from grpo_mp.rollout.protocol import EpisodeLimitError, Policy
from grpo_mp.utils.errors import EngineError, UserError

LOGGER = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
MAX_BODY = 16 * 2**20  # bytes
INVALID = "invalid_request_error"
Api = ModuleType  # openai_requests or anthropic_requests: both define the same functions


@dataclass
class Session:
    """One episode's access to the endpoint. `failure`: future that gets the error that ended the episode."""

    policy: Policy
    base_url: str
    api_key: str
    failure: "asyncio.Future[None]"
    role: str = ""  # of the agent, see Policy.generate
    reached_limit: asyncio.Event = field(default_factory=asyncio.Event)
    turns: set["asyncio.Task[web.Response]"] = field(default_factory=set)  # tasks of running and waiting requests
    queue: asyncio.Lock = field(default_factory=asyncio.Lock)  # one turn at a time, in the order of the requests
    warned: set[str] = field(default_factory=set)  # ignored parameters already warned about, shared by all sessions


@dataclass
class Endpoint:
    """HTTP server for all episodes of a rank, which listens while an episode is open."""

    sessions: dict[str, Session] = field(default_factory=dict)  # open sessions by API key
    warned: set[str] = field(default_factory=set)
    _server: "asyncio.Task[tuple[web.AppRunner, str]] | None" = None

    @asynccontextmanager
    async def open(self, policy: Policy) -> AsyncIterator[Session]:
        """Yield a session with URL and key for an episode; on exit revoke the key and cancel running turns."""
        if self._server is None:
            self._server = asyncio.create_task(_listen(self.sessions))
        key = f"sk-{secrets.token_urlsafe(24)}"
        server = self._server
        failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        session = self.sessions[key] = Session(policy, "", key, failure, warned=self.warned)
        try:
            _, session.base_url = await asyncio.shield(server)
            yield session
        finally:
            del self.sessions[key]
            failure.cancel()
            if is_last := not self.sessions:
                self._server = None
            await _end(session.turns)
            if is_last:
                await (await server)[0].cleanup()


Handler = Callable[[Session, Api, ChatRequest], Coroutine[Any, Any, web.Response]]


async def _end(turns: set["asyncio.Task[web.Response]"]) -> None:
    for turn in turns:
        turn.cancel()
    await asyncio.gather(*turns, return_exceptions=True)


async def _listen(sessions: Mapping[str, Session]) -> tuple[web.AppRunner, str]:
    """Start the server on a free port; return the server and its URL."""
    app = web.Application(client_max_size=MAX_BODY)
    app.router.add_post("/v1/chat/completions", partial(_serve, sessions, openai_requests, _answer))
    app.router.add_get("/v1/models", partial(_models, sessions))
    app.router.add_post("/v1/messages", partial(_serve, sessions, anthropic_requests, _answer))
    app.router.add_post("/v1/messages/count_tokens", partial(_serve, sessions, anthropic_requests, _count))
    # Cancel the turn of a client that disconnects: nobody would read the response.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, LOOPBACK, 0).start()
    return runner, f"http://{LOOPBACK}:{runner.addresses[0][1]}/v1"


async def _models(sessions: Mapping[str, Session], request: web.Request) -> web.Response:
    _session(sessions, openai_requests, request)
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "grpo_mp"}]})


async def _serve(sessions: Mapping[str, Session], api: Api, handle: Handler, request: web.Request) -> web.Response:
    """Answer a request by `handle`."""
    session = _session(sessions, api, request)
    try:
        chat = api.read_request(await request.read())
        return await _generate(session, asyncio.ensure_future(handle(session, api, chat)))
    except web.HTTPException:  # the body is too long
        raise
    except EpisodeLimitError as error:
        session.reached_limit.set()
        return _error(api, 400, str(error), INVALID, "context_length_exceeded")
    except EngineError as error:
        return _fail(session, api, error)
    except (RequestError, UserError, ValueError) as error:  # ValueError: rejected by the policy
        return _error(api, 400, str(error), INVALID)
    except Exception as error:  # noqa: BLE001 - the episode raises it
        return _fail(session, api, error)


async def _answer(session: Session, api: Api, chat: ChatRequest) -> web.Response:
    """Generate the turn of a request after the turns of earlier requests, and return the HTTP response."""
    if ignored := [name for name in chat.ignored(session.policy) if name not in session.warned]:
        session.warned.update(ignored)
        LOGGER.warning("requests of agents give %s: turns are sampled as the run says", ", ".join(ignored))
    policy = session.policy
    async with session.queue:
        turn = await chat.generate(policy, session.role)
        *before, _ = policy.episode().segments
    answer = api.response(turn, sum(len(part.tokens) for part in before))
    if chat.stream:
        return web.Response(text=api.as_stream(answer), content_type="text/event-stream")
    return web.json_response(answer)


async def _count(session: Session, _: Api, chat: ChatRequest) -> web.Response:
    """Return the number of tokens that a turn would be generated after."""
    return web.json_response({"input_tokens": chat.count_tokens(session.policy)})


async def _generate(session: Session, turn: "asyncio.Task[web.Response]") -> web.Response:
    """Await a turn as a task of the session, so that the end of the session cancels it."""
    session.turns.add(turn)
    try:
        return await turn
    finally:
        turn.cancel()
        session.turns.discard(turn)


def _session(sessions: Mapping[str, Session], api: Api, request: web.Request) -> Session:
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
    keys = (bearer, *map(request.headers.get, ("X-Api-Key", "X-Session-ID")))  # headers of Anthropic and of verifiers
    key = next((key for key in keys if key in sessions), None)
    if key is None:
        body = api.error_body("the key is of no episode, or of one that has ended", INVALID, "invalid_api_key")
        raise web.HTTPUnauthorized(text=json.dumps(body), content_type="application/json")
    return sessions[key]


def _fail(session: Session, api: Api, error: Exception) -> web.Response:
    """Set the session's failure, which ends the episode even if the agent ignores the response; return status 500."""
    if not session.failure.done():
        session.failure.set_exception(error)
    return _error(api, 500, "the episode has ended", "server_error")


def _error(api: Api, status: int, message: str, kind: str, code: str | None = None) -> web.Response:
    return web.json_response(api.error_body(message, kind, code), status=status)
