"""SGLang servers beside the job that load its exports: opponents or judges that are an older version of the policy."""

from collections.abc import Mapping
from pathlib import Path

import httpx

from grpo_mp.config.sections import ExportServers
from grpo_mp.errors import one_line
from grpo_mp.redact import mask_headers, split_login
from grpo_mp.rewards.reward_model import read_api_key

PATH = "/update_weights_from_disk"  # SGLang's: once its running requests have ended, and with an empty cache
SETTING = "run.export_servers"


def load_export(servers: ExportServers, folder: Path) -> list[str]:
    """Let each server load the weights of `folder`, which it must see at the same path.

    Returns a sentence for each that does not: it keeps the version before.
    """
    key = read_api_key(SETTING, servers.api_key_env)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    addresses = [split_login(url) for url in servers.urls]
    # trust_env is off: a proxy of the environment would be asked for loopback addresses, too.
    with httpx.Client(trust_env=False, timeout=servers.timeout_s) as client:
        failures = ((url, _failure(client, url, headers | login, folder)) for url, login in addresses)
        return [
            f"{SETTING}: {url} does not load {folder}: {failure}; it keeps the version before"
            for url, failure in failures
            if failure
        ]


def _failure(client: httpx.Client, url: str, headers: Mapping[str, str], folder: Path) -> str:
    try:
        reply = client.post(f"{url.rstrip('/')}{PATH}", json={"model_path": str(folder.resolve())}, headers=headers)
    except httpx.HTTPError as error:
        return f"no answer ({type(error).__name__}: {error})"
    return "" if reply.is_success else f"status {reply.status_code}: {one_line(mask_headers(reply.text, headers))}"
