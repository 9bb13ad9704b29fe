"""SGLang servers beside the job that load its exports: opponents or judges that are an older version of the policy."""

from pathlib import Path

import httpx

from grpo_mp.config.sections import ExportServers
from grpo_mp.rewards.reward_model import Server, read_address, read_api_key, shown_text

PATH = "/update_weights_from_disk"  # SGLang's: once its running requests have ended, and with an empty cache
SETTING = "run.export_servers"


def read_servers(servers: ExportServers) -> list[Server]:
    """Return the servers with the headers of requests to them. Raises UserError for an address or key that is none."""
    key = read_api_key(SETTING, servers.api_key_env)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    addresses = [read_address(f"{SETTING}.urls", url) for url in servers.urls]
    return [Server(url, headers | login) for url, login in addresses]


def load_export(servers: ExportServers, folder: Path) -> list[str]:
    """Let each server load the weights of `folder`, which it must see at the same path.

    Returns a sentence for each that does not: it keeps the version before.
    """
    # trust_env is off: a proxy of the environment would be asked for loopback addresses, too.
    with httpx.Client(trust_env=False, timeout=servers.timeout_s) as client:
        failures = ((server.url, _failure(client, server, folder)) for server in read_servers(servers))
        return [
            f"{SETTING}: {url} does not load {folder}: {failure}; it keeps the version before"
            for url, failure in failures
            if failure
        ]


def _failure(client: httpx.Client, server: Server, folder: Path) -> str:
    body, headers = {"model_path": str(folder.resolve())}, server.headers
    try:
        reply = client.post(f"{server.url.rstrip('/')}{PATH}", json=body, headers=headers)
    except httpx.HTTPError as error:
        return f"no answer ({type(error).__name__}: {shown_text(str(error), headers)})"
    return "" if reply.is_success else f"status {reply.status_code}: {shown_text(reply.content, headers)}"
