"""What the installed SGLang can do, asked from the running server in one place. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Capabilities:
    """Differences between SGLang versions that change what this program sends."""

    version: str
    weight_update_session: bool  # updates stand between /begin_weight_update and /end_weight_update (0.5.20 on)
    weight_version: bool  # the server numbers its weights and reports the number with every response


def probe(server_info: Mapping[str, Any], openapi: Mapping[str, Any]) -> Capabilities:
    """Read the server's own description: /server_info and the routes of /openapi.json."""
    routes = openapi.get("paths", {})
    return Capabilities(
        version=str(server_info.get("version", "unknown")),
        weight_update_session="/begin_weight_update" in routes and "/end_weight_update" in routes,
        weight_version="/update_weight_version" in routes,
    )
