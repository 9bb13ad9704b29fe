"""An environment of OpenEnv as a class of tools, over the WebSocket protocol of its server (`openenv` 0.10)."""

import importlib
import json
import math
import weakref
from collections.abc import Mapping
from contextlib import suppress
from numbers import Real
from typing import Any

import httpx

from grpo_mp.rollout.mcp_tools import ConnectionLostError, ToolCallError, fill_in
from grpo_mp.rollout.protocol import ListedTools, function_schema
from grpo_mp.utils.errors import UserError, one_line, refuse_failures

SECTION = "rollout.tool_args grpo_mp.rollout.openenv:Environment"
ACTIONS_OF_MCP = ("Action", "CallToolAction", "ListToolsAction")  # names of the actions of environments with MCP tools
STEP = "step"  # the server refuses MCP tools of this name
ENDS = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")  # codes of errors with which the server ends a session
MOST_BYTES = 2**26  # maximum size of a message


class Environment(ListedTools):
    """A session with an OpenEnv server, one for each episode.

    The tools are the environment's MCP tools. An environment without any has the tool `step`, whose arguments are the
    fields of its action.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        """Check the arguments and import `websockets`; nothing is connected.

        `url`: address of the server; `headers`: see fill_in.
        """
        if not str(url).startswith(("http://", "https://")):
            raise UserError(f"{SECTION}: url is {url!r:.80}: set the address of a server, http://HOST:8000")
        try:
            self._library = importlib.import_module("websockets.sync.client")
        except ImportError as error:
            raise UserError(f"{SECTION}: the package is missing here ({error}): pip install websockets") from error
        self._url = url.rstrip("/")
        self._headers = fill_in(headers or {}, SECTION)
        self._socket: Any = None
        self._lost = ""  # why the session was lost
        self._is_over = False
        self._reward = 0.0

    async def schemas(self) -> list[dict[str, Any]]:
        """Return the JSON schemas of the tools. Raises UserError if the server does not answer or has none."""
        with refuse_failures(f"{self._url} does not answer as a server of OpenEnv"):
            async with httpx.AsyncClient(headers=self._headers, timeout=None, trust_env=False) as client:
                action = (await client.get(f"{self._url}/schema")).raise_for_status().json()["action"]
            if action["title"] not in ACTIONS_OF_MCP:
                fields = {name: field for name, field in action["properties"].items() if name != "metadata"}
                return [function_schema(STEP, action.get("description", ""), {**action, "properties": fields})]
            tools = self._ask(STEP, {"type": "list_tools"})["tools"]
            schemas = [function_schema(tool["name"], tool["description"], tool["input_schema"]) for tool in tools]
        if not schemas:
            raise UserError(f"the environment at {self._url} has no tools")
        return schemas

    def reset(self, **columns: Any) -> str:
        """Begin an episode with the columns of the data row; return a line break and the first observation."""
        text = _as_text(self._ask("reset", columns))
        self._reward = 0.0
        return f"\n{text}" if text else ""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run one step of the environment and return its observation as text.

        Raises ToolCallError if the step failed or the episode is over, ConnectionLostError if the session is lost.
        """
        if self._is_over:
            raise ToolCallError("the environment's episode is over")
        action = arguments if name == STEP else {"type": "call_tool", "tool_name": name, "arguments": arguments}
        text = _as_text(self._ask(STEP, action))
        return f"{text}\nThe episode is over." if self._is_over else text

    def get_reward(self) -> float:
        """Return the sum of the rewards of all steps. Raises ConnectionLostError if the session was lost."""
        if self._lost:
            raise ConnectionLostError(self._lost)
        return self._reward

    def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a request and return the observation; add its reward."""
        self.get_reward()  # not after a lost session
        try:
            if self._socket is None:
                self._socket = self._library.connect(
                    f"ws{self._url[4:]}/ws", additional_headers=self._headers, max_size=MOST_BYTES, proxy=None
                )
                weakref.finalize(self, self._socket.close)  # the worker process lives longer than the episode
            observation, reward, self._is_over = _read(self._exchange(json.dumps({"type": kind, "data": data})))
        except ToolCallError:
            raise
        except Exception as error:
            self._lost = f"the session with {self._url} is lost: {type(error).__name__}: {one_line(error)}"
            raise ConnectionLostError(self._lost) from error
        self._reward += reward
        return observation

    def _exchange(self, request: str) -> Any:
        with suppress(TimeoutError):
            early = json.loads(self._socket.recv(timeout=0))
            if early["type"] != "error":  # else the server has refused the session
                raise ValueError(f"a message that was not asked for: {early!r:.80}")
            return early
        with suppress(Exception):  # a refused session has ended after an error message, which comes next
            self._socket.send(request)
        return json.loads(self._socket.recv())


def _read(reply: Mapping[str, Any]) -> tuple[Mapping[str, Any], float, bool]:
    """Return observation, reward and whether the episode is over.

    Raises ToolCallError if the step failed, ConnectionError if the server ended the session, else for a bad reply.
    """
    data = reply["data"]
    if reply["type"] == "error":
        if data.get("code") in ENDS:
            raise ConnectionError(data["message"])
        wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in data.get("errors", ())]
        raise ToolCallError("; ".join([data["message"], *wrong]))
    reward = data.get("reward") or 0.0
    if not (isinstance(data["observation"], Mapping) and isinstance(reward, Real) and math.isfinite(reward)):
        raise ValueError(f"no observation with a finite reward: {data!r:.80}")
    return data["observation"], float(reward), bool(data.get("done"))


def _as_text(observation: Mapping[str, Any]) -> str:
    """Return the result of an MCP tool, or the fields of an observation: a single text as it is, others as JSON.

    Raises ToolCallError if the MCP tool failed.
    """
    if error := "tool_name" in observation and observation.get("error"):
        raise ToolCallError(error["message"])
    shown: Any = {name: value for name, value in observation.items() if name != "metadata"}
    if "tool_name" in observation:
        shown = {"result": observation.get("result")}
        with suppress(TypeError, KeyError):
            shown = {"result": "\n".join(part["text"] for part in observation["result"]["content"])}
    if len(shown) == 1:
        (shown,) = shown.values()
    return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False) if shown else ""
