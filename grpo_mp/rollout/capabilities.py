"""What the installed SGLang can do, read from the running server's own description. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REQUIRED_ROUTES = (
    "/generate",
    "/flush_cache",
    "/update_weights_from_tensor",
    "/update_weight_version",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/weights_checker",
)


@dataclass(frozen=True)
class Capabilities:
    """Differences between SGLang versions that change what this program sends, and what it cannot do without."""

    version: str
    weight_update_session: bool  # updates are sent between /begin_weight_update and /end_weight_update (0.5.20 on)
    missing: tuple[str, ...]  # of REQUIRED_ROUTES

    @property
    def sentence(self) -> str:
        """The line that a run prints at its start."""
        updates = "weights in sessions" if self.weight_update_session else "weights without sessions"
        return f"engines: SGLang {self.version}, {updates}"


def read_capabilities(server_info: Mapping[str, Any], openapi: Mapping[str, Any]) -> Capabilities:
    """Read the server's own description: /server_info and the routes of /openapi.json."""
    routes = openapi.get("paths", {})
    return Capabilities(
        version=str(server_info.get("version", "unknown")),
        weight_update_session="/begin_weight_update" in routes and "/end_weight_update" in routes,
        missing=tuple(route for route in REQUIRED_ROUTES if route not in routes),
    )
