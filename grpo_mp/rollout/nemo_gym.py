"""Tasks of NeMo-Gym (`nemo-gym` 0.7) as a data source, and the rollout function that plays them."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from grpo_mp.rollout.protocol import Episode, EpisodeLimitError, Policy, Task, ToolCall, function_schema
from grpo_mp.utils.errors import UserError, one_line, refuse_failures
from grpo_mp.utils.reading import parse_json
from grpo_mp.utils.types import Message

PARAMETERS = "responses_create_params"
MOST_BYTES = 2**26  # maximum size of an answer
ANSWER_S = 30.0  # time limit of the answer that is asked for at the start


def read_tasks(name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSONL file of NeMo-Gym, each with a column `prompt`: its input as chat messages."""
    for number, line in enumerate(Path(name).read_text(encoding="utf-8").splitlines(), start=1):
        row = parse_json(line, f"{name}, line {number}")
        try:
            given = row[PARAMETERS]["input"]
            items = [{"role": "user", "content": given}] if isinstance(given, str) else given
            yield {**row, "prompt": [_as_message(item) for item in items]}
        except (KeyError, TypeError) as error:
            raise UserError(f"{name}, line {number}: {PARAMETERS}.input is no text and no messages") from error


class RequestError(Exception):
    """The server answered with the status of an error."""


class Resources:
    """The rollout function: calls the tools of a task on a resources server, which verifies the episode."""

    def __init__(self, url: str, tool_s: float = 60.0) -> None:
        """Check that a server answers at `url`. `tool_s`: time limit of one tool call, in seconds."""
        if not str(url).startswith(("http://", "https://")):
            raise UserError(f"rollout.function_args: url is {url!r:.80}: set the address of a resources server")
        with refuse_failures(f"rollout.function_args: no resources server answers at {url}"):
            httpx.get(url, timeout=ANSWER_S, trust_env=False)
        self._url = url
        self._tool_s = tool_s

    async def __call__(self, task: Task, policy: Policy) -> Episode:
        """Roll out one task. Metrics as of `call_tools`. Raises ConnectionError if the server is lost."""
        columns = {name: value for name, value in task.prompt.columns.items() if name != "prompt"}
        tools = columns[PARAMETERS].get("tools") or []
        counts = Counter(tool_calls=0, tool_raised=0, tool_timeout=0)
        # Cookies carry the session. `rollout.limits.episode_s` limits all requests.
        async with httpx.AsyncClient(base_url=self._url, timeout=None, trust_env=False) as client:
            await _ask(client, "/seed_session", columns)
            output, is_cut = await self._play(client, list(task.messages), policy, tools, counts)
            response = _as_response(output, tools, is_cut)
            verdict = json.loads(await _ask(client, "/verify", {**columns, "response": response}))
        if not isinstance(verdict, Mapping) or verdict.get("reward") is None or verdict.get("mask_sample"):
            raise ValueError(f"/verify gave no valid reward: {verdict!r:.200}")
        return policy.episode(verdict["reward"], counts, state="truncated" if is_cut else None)

    async def _play(
        self,
        client: httpx.AsyncClient,
        messages: list[Message],
        policy: Policy,
        tools: list[dict[str, Any]],
        counts: Counter[str],
    ) -> tuple[list[dict[str, Any]], bool]:
        """Generate turns and call tools until a turn calls none.

        Returns the output items of the Responses object, and whether a limit cut the episode.
        """
        schemas = [function_schema(tool["name"], tool.get("description") or "", tool["parameters"]) for tool in tools]
        output = list[dict[str, Any]]()
        while True:
            try:
                turn = await policy.generate(messages, tools=schemas)
            except EpisodeLimitError:
                return output, True
            messages.append(turn.message)
            text = {"type": "output_text", "text": turn.text, "annotations": []}
            message = {"type": "message", "role": "assistant", "status": "completed", "content": [text]}
            output.append({"id": f"msg_{len(output)}", **message})
            if not turn.tool_calls:
                return output, not turn.finished
            for call in turn.tool_calls:
                name = f"call_{len(output)}"
                result = await self._call(client, call, [tool["name"] for tool in tools], counts)
                output.append({"call_id": name, "type": "function_call", "name": call.name, "arguments": call.text})
                output.append({"call_id": name, "type": "function_call_output", "output": result})
                messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result})

    async def _call(self, client: httpx.AsyncClient, call: ToolCall, names: list[str], counts: Counter[str]) -> str:
        """Return the result of a tool as text; failures are results and counted."""
        counts["tool_calls"] += 1
        error = call.error or ("" if call.name in names else f"there is no tool {call.name}")
        try:
            if not error:
                return await _ask(client, f"/{call.name}", call.arguments, self._tool_s)
        except RequestError as failed:
            error = str(failed)
        except TimeoutError:
            counts["tool_timeout"] += 1
            return f"Error: {call.name} took longer than {self._tool_s:g} s"
        counts["tool_raised"] += 1
        return f"Error: {error}"


async def _ask(client: httpx.AsyncClient, path: str, body: Any, limit_s: float | None = None) -> str:
    """Post a request, return the answer. Raises TimeoutError, RequestError, ConnectionError if the server is lost."""
    content = bytearray()
    try:
        async with asyncio.timeout(limit_s), client.stream("POST", path, json=body) as response:
            async for part in response.aiter_bytes():
                content += part
                if len(content) > MOST_BYTES:
                    raise ValueError(f"{path} gave more than {MOST_BYTES} bytes")
    except httpx.TransportError as error:
        lost = f"{client.base_url} is lost: {type(error).__name__}: {one_line(error)}"
        raise ConnectionError(f"the resources server {lost}") from error
    text = content.decode("utf-8", "replace")
    if response.is_error:
        raise RequestError(f"{path} gave status {response.status_code}: {text}")
    return text


def _as_message(item: Mapping[str, Any]) -> Message:
    """Return a message of an input as a chat message."""
    content = item["content"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return {"role": "system" if item["role"] == "developer" else item["role"], "content": text}


def _as_response(output: list[dict[str, Any]], tools: list[dict[str, Any]], is_cut: bool) -> dict[str, Any]:
    """Return an episode as an object of OpenAI's Responses API."""
    cut = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    choices = {"tools": tools, "tool_choice": "auto", "parallel_tool_calls": True}
    head = {"id": "resp_0", "object": "response", "created_at": 0, "model": "policy", "status": "completed"}
    return {**head, **choices, "output": output, **(cut if is_cut else {})}
