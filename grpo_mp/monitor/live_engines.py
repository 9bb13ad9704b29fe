"""What the engines of a run that goes on hold: their weight versions and checksums, asked on this host."""

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from grpo_mp.checkpoint.run_state import PROCESSES
from grpo_mp.monitor.rank_processes import find_process, started_ranks
from grpo_mp.rollout.client import EngineClient
from grpo_mp.rollout.engine_main import ARGUMENTS
from grpo_mp.utils.errors import EngineError, UserError

REQUEST_LIMIT_S, CHECKSUM_LIMIT_S = 10.0, 300.0
ENGINE_NAME = re.compile(r"engine-(\d+)-")  # of what the server says that it serves


@dataclass(frozen=True)
class EngineServer:
    """Where an engine of a run answers, and on which device it computes."""

    index: int
    url: str
    api_key: str
    device: str

    @property
    def headers(self) -> dict[str, str]:
        """Return the HTTP headers that every request needs."""
        return {"Authorization": f"Bearer {self.api_key}"}


@dataclass(frozen=True)
class EngineWeights:
    """What an engine holds. `checksums` is None where it may not be asked now, `failure` says what went wrong.

    `changed`: a sync gave it the weights of `version` while it was asked, so its checksums say nothing.
    """

    index: int
    version: str = ""
    checksums: Mapping[str, str] | None = None
    failure: str = ""
    changed: bool = False


def find_servers(run_folder: Path) -> list[EngineServer]:
    """Return the engines that ranks of this host started; none of a run that has ended."""
    servers = []
    if not any((run_folder / PROCESSES).glob("rank_*.json")):
        return []
    for started in started_ranks(run_folder).values():
        process = find_process(started.pid, started.started_s)
        children = process.children() if process else []
        for child in children:
            try:
                arguments = child.environ().get(ARGUMENTS)
            except psutil.Error:
                continue  # it ends, or belongs to another user
            if arguments and (server := read_server(json.loads(arguments))):
                servers.append(server)
    return sorted(servers, key=lambda server: server.index)


def read_server(arguments: Mapping[str, Any]) -> EngineServer | None:
    """Return where the engine of these SGLang arguments answers; None for a part of one, or a reward model. Pure."""
    match = ENGINE_NAME.match(str(arguments.get("served_model_name", "")))
    if not match or arguments.get("node_rank"):
        return None
    url = f"http://127.0.0.1:{arguments['port']}"
    return EngineServer(int(match[1]), url, str(arguments["api_key"]), str(arguments.get("device", "")))


def ask_weights(server: EngineServer) -> EngineWeights:
    """Return what an engine holds.

    On a GPU its weights may be asleep, and reading them then would end it: it is asked only while requests run, which
    it finishes before it sleeps.
    """
    try:
        with httpx.Client(
            base_url=server.url, headers=server.headers, timeout=REQUEST_LIMIT_S, trust_env=False
        ) as http:
            version = _version(http)
            loads = http.get("/v1/loads", params={"include": "core"}).raise_for_status().json()["loads"]
            if server.device != "cpu" and not any(load["num_running_reqs"] for load in loads):
                return EngineWeights(server.index, version)
            checksums = asyncio.run(_checksums(server))
            after = _version(http)
        if after != version:
            return EngineWeights(server.index, after, changed=True)
        return EngineWeights(server.index, version, checksums)
    except (httpx.HTTPError, ValueError, KeyError, TypeError, EngineError, UserError) as error:
        return EngineWeights(server.index, failure=str(error) or type(error).__name__)


def _version(http: httpx.Client) -> str:
    return str(http.get("/model_info").raise_for_status().json()["weight_version"])


async def _checksums(server: EngineServer) -> dict[str, str]:
    client = EngineClient(server.index, server.url, server.headers, CHECKSUM_LIMIT_S)
    async with aclosing(client):
        return await client.checksums(with_draft=True)
